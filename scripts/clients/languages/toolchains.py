"""What each language takes: packages, the commands that generate stubs and build, the command that runs.

Builds into a folder of its own below `build/clients/`, and installs with Debian's packages and npm. Does not depend on
pools. The README beside each program has the same commands for a program of somebody's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = ROOT / "scripts" / "clients"
PROTOS = ROOT / "protos"
BUILD = ROOT / "build" / "clients"
VECTORS = ROOT / "tests" / "data" / "wire" / "vectors.tsv"
BUILD_S = 600.0
PROTOC = {"protobuf-compiler": "protoc", "libprotobuf-dev": ""}
"""`protoc`, and the .proto files of its own that it reads."""
JARS = (
    "geronimo-annotation-1.3-spec grpc-api grpc-context grpc-core grpc-netty grpc-protobuf "
    "grpc-protobuf-lite grpc-stub gson guava netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common "
    "netty-handler netty-resolver netty-tcnative netty-transport perfmark-api proto-google-common-protos protobuf "
    "protobuf-util"
)
"""What Java's program needs of `/usr/share/java`."""

Command = Sequence[str | Path]


class ToolchainError(Exception):
    """Something could not be installed or built; the message says what, and has the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """One language with its program."""

    name: str
    """Also the folder in `scripts/clients/`."""
    packages: Mapping[str, str]
    """Debian's packages, each with a command that makes the package needless where it is there; empty: none does."""
    library: Callable[[Path], str]
    """Returns the version of its gRPC library; takes the folder of the build."""
    build: Callable[[Path, Path], Sequence[Command]]
    """Returns the commands that build, each run in the folder of the build: takes sources and that folder."""
    run: Callable[[Path, Path], Command]
    """Returns the command that goes through the scenario: takes sources and the folder of the build."""
    vectors: Callable[[Path, Path], Command]
    """Returns the command that checks vectors of the wire format; their file is its last argument."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, for building and running."""

    @property
    def sources(self) -> Path:
        """The folder with the program."""
        return CLIENTS / self.name

    @property
    def folder(self) -> Path:
        """The folder of the build."""
        return BUILD / self.name

    @property
    def command(self) -> Command:
        """The command that goes through the scenario."""
        return self.run(self.sources, self.folder)


def install(languages: Sequence[Language]) -> None:
    """Install the Debian packages that are missing, and print which. Raises ToolchainError."""
    wanted = {package: command for language in languages for package, command in language.packages.items()}
    missing = [package for package, command in wanted.items() if not _is_there(package, command)]
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise ToolchainError(f"not installed: {', '.join(missing)}; as root: apt-get install {' '.join(missing)}")
    print(f"installing Debian's packages: {' '.join(missing)}", flush=True)
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _done(["apt-get", "update", "-qq"], ROOT, quiet)
    _done(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], ROOT, quiet)


def build(language: Language) -> None:
    """Generate the stubs of a language, and build its program. Raises ToolchainError."""
    language.folder.mkdir(parents=True, exist_ok=True)
    for command in language.build(language.sources, language.folder):
        _done(command, language.folder, language.environment)


def check_vectors(language: Language) -> None:
    """Check the vectors of the wire format with a language. Raises ToolchainError if one differs."""
    num_vectors = len(VECTORS.read_text(encoding="utf-8").splitlines()) - 1
    output = _done([*language.vectors(language.sources, language.folder), VECTORS], ROOT, language.environment)
    if output != f"{num_vectors} vectors\n":
        raise ToolchainError(f"{language.name} has checked other vectors than the {num_vectors} of {VECTORS}: {output}")


def _is_there(package: str, command: str) -> bool:
    if command and shutil.which(command) is not None:
        return True
    return "install ok installed" in _queried(package, "${Status}")


def _queried(package: str, form: str) -> str:
    if shutil.which("dpkg-query") is None:
        return ""
    command = ["dpkg-query", "--show", f"--showformat={form}", package]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _done(command: Command, folder: Path, variables: Mapping[str, str]) -> str:
    """Run a command to its end, and return its output. Raises ToolchainError with the output if it fails."""
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{shown}: {error}") from error
    if done.returncode != 0:
        raise ToolchainError(f"{shown} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def _debian(package: str) -> Callable[[Path], str]:
    return lambda _: _queried(package, "${Version}").partition("-")[0].partition("+")[0]


def _protos() -> list[Path]:
    return sorted(PROTOS.glob("tinkerpool/v1/*.proto"))


def _googleapis() -> str:
    """Return a folder with `google/rpc/*.proto`: that of the Python package googleapis-common-protos."""
    found = importlib.util.find_spec("google.rpc.status_pb2")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parents[2])


def _copied(sources: Path, pattern: str, folder: Path) -> Command:
    return ["cp", *sorted(sources.glob(pattern)), folder]


def _build_node(sources: Path, folder: Path) -> list[Command]:
    install_packages = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefer-offline"]
    return [_copied(sources, "*.mjs", folder), _copied(sources, "package.json", folder), install_packages]


def _node_library(folder: Path) -> str:
    installed = folder / "node_modules" / "@grpc" / "grpc-js" / "package.json"
    return str(json.loads(installed.read_text(encoding="utf-8"))["version"])


def _build_go(sources: Path, folder: Path) -> list[Command]:
    module = folder / "src" / "example.com" / "train"
    generated = module / "gen"
    options = ["--go_opt=paths=source_relative", "--go-grpc_opt=paths=source_relative"]
    return [
        ["mkdir", "-p", generated],
        ["protoc", "-I", PROTOS, f"--go_out={generated}", f"--go-grpc_out={generated}", *options, *_protos()],
        _copied(sources, "*.go", module),
        ["go", "build", "-o", folder / "train", "example.com/train"],
    ]


def _build_java(sources: Path, folder: Path) -> list[Command]:
    generated, classes, native = folder / "gen", folder / "classes", folder / "native"
    find_and_compile = f'javac -nowarn -cp "{_class_path()}" -d classes $(find gen -name "*.java") "$0"/*.java'
    return [
        ["mkdir", "-p", generated, classes, native],
        [
            "protoc",
            "-I",
            PROTOS,
            f"--java_out={generated}",
            f"--grpc-java_out={generated}",
            *_java_plugin(),
            *_protos(),
        ],
        ["protoc", "-I", _googleapis(), f"--java_out={generated}", "google/rpc/error_details.proto"],
        ["sh", "-c", find_and_compile, sources],
        # Debian's netty has TLS with OpenSSL only, and looks for the library under another name than its package has.
        ["sh", "-c", "cp /usr/lib/*/jni/libnetty-tcnative.so native/libnetty_tcnative.so"],
    ]


def _java_plugin() -> list[str]:
    return [f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin') or 'grpc_java_plugin'}"]


def _class_path() -> str:
    return ":".join(f"/usr/share/java/{name}.jar" for name in JARS.split())


def _java(main: str) -> Callable[[Path, Path], Command]:
    def command(sources: Path, folder: Path) -> Command:
        del sources
        return [
            "java",
            f"-Djava.library.path={folder / 'native'}",
            "-cp",
            f"{folder / 'classes'}:{_class_path()}",
            main,
        ]

    return command


def _build_cpp(sources: Path, folder: Path) -> list[Command]:
    variables = [f"OUT={folder}", f"PROTOS={PROTOS}", f"GOOGLEAPIS={_googleapis()}", "CXXFLAGS=-O0"]
    return [["make", "-C", sources, "-j", str(os.cpu_count() or 1), *variables]]


def _build_ruby(sources: Path, folder: Path) -> list[Command]:
    del sources
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_ruby_plugin') or 'grpc_ruby_plugin'}"
    return [["protoc", "-I", PROTOS, f"--ruby_out={folder}", f"--grpc_out={folder}", plugin, *_protos()]]


PYTHON = Language(
    name="python",
    packages={},
    library=lambda _: str(grpc.__version__),
    build=lambda *_: [],
    run=lambda *_: [sys.executable, "-m", "scripts.clients.languages.reference"],
    vectors=lambda *_: [],
    environment={"PYTHONPATH": str(ROOT)},
)
"""The scenario in Python, which the others are compared with."""

LANGUAGES = (
    Language(
        name="node",
        packages={"nodejs": "node", "npm": "npm"},
        library=_node_library,
        build=_build_node,
        run=lambda _, folder: ["node", folder / "train.mjs"],
        vectors=lambda _, folder: ["node", folder / "vectors.mjs"],
        environment={"TINKERPOOL_PROTOS": str(PROTOS)},
    ),
    Language(
        name="go",
        packages=PROTOC
        | {
            "golang-go": "go",
            "golang-google-grpc-dev": "",
            "golang-github-golang-protobuf-1-5-dev": "",
            "protoc-gen-go-1-5": "protoc-gen-go",
            "protoc-gen-go-grpc": "protoc-gen-go-grpc",
        },
        library=_debian("golang-google-grpc-dev"),
        build=_build_go,
        run=lambda _, folder: [folder / "train"],
        vectors=lambda _, folder: [folder / "train"],
        environment={"GO111MODULE": "off", "GOPATH": f"{BUILD / 'go'}:/usr/share/gocode"},
    ),
    Language(
        name="java",
        packages=PROTOC
        | {
            "default-jdk-headless": "javac",
            "libgeronimo-annotation-1.3-spec-java": "",
            "libgoogle-common-protos-java": "",
            "libgrpc-java": "",
            "libgoogle-gson-java": "",
            "libguava-java": "",
            "libnetty-java": "",
            "libnetty-tcnative-java": "",
            "libperfmark-java": "",
            "libprotobuf-java": "",
            "protobuf-compiler-grpc-java-plugin": "grpc_java_plugin",
        },
        library=_debian("libgrpc-java"),
        build=_build_java,
        run=_java("Train"),
        vectors=_java("Vectors"),
    ),
    Language(
        name="cpp",
        packages=PROTOC
        | {
            "g++": "g++",
            "libgrpc++-dev": "",
            "libssl-dev": "",
            "make": "make",
            "pkg-config": "pkg-config",
            "protobuf-compiler-grpc": "grpc_cpp_plugin",
        },
        library=_debian("libgrpc++-dev"),
        build=_build_cpp,
        run=lambda _, folder: [folder / "train"],
        vectors=lambda _, folder: [folder / "vectors"],
    ),
    Language(
        name="ruby",
        packages=PROTOC | {"ruby": "ruby", "ruby-grpc": "", "protobuf-compiler-grpc": "grpc_ruby_plugin"},
        library=_debian("ruby-grpc"),
        build=_build_ruby,
        run=lambda sources, folder: ["ruby", "-I", folder, sources / "train.rb"],
        vectors=lambda sources, folder: ["ruby", "-I", folder, sources / "vectors.rb"],
    ),
)
"""The programs, in the order of the table."""
SHORT = ("node", "go")
"""Those that CI runs."""
