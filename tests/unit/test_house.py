"""Rules of imports that import-linter cannot express, and the generated code."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.support.mini_model import build_mini_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tinkerpool", "workers", "coordinator")

# library -> the only files that may import it
CONFINED = {
    "sqlite3": ["coordinator/storage/sqlite.py"],
    "ray": ["workers/pool/*.py"],
    "grpc": ["coordinator/doors/grpc/*.py", "tinkerpool/client/calls/transport.py", "tinkerpool/*_pb2_grpc.py"],
    "grpc_health": ["coordinator/doors/grpc/*.py"],
    "grpc_reflection": ["coordinator/doors/grpc/*.py"],
    "starlette": ["coordinator/doors/*.py"],
    "uvicorn": [
        "coordinator/doors/http_server.py",
        "coordinator/doors/http/connections.py",
        "coordinator/doors/metrics.py",
    ],
    "prometheus_client": [
        *("coordinator/observe/metrics.py", "coordinator/runtime/gauges.py", "coordinator/doors/metrics.py"),
        "scripts/generate_metrics.py",
    ],
    "opentelemetry": ["coordinator/observe/traces.py", "tinkerpool/client/calls/tracing.py"],
    "pyrage": ["coordinator/storage/exports.py"],
    "perfetto": ["coordinator/observe/session_trace.py"],
    "jinja2": ["coordinator/doors/openai/templates.py"],
    "tokenizers": ["coordinator/doors/openai/*.py", "workers/*.py"],
    "triton": ["workers/*_kernels.py"],
    "grpc_status": ["coordinator/doors/grpc/*.py", "tinkerpool/client/calls/transport.py"],
}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the top-level names of all libraries that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


@pytest.mark.xdist_group("imports")  # one process, which parses each file once
@pytest.mark.parametrize("library", CONFINED)
def test_library_is_imported_only_in_its_own_files(library: str) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if library in imports_of(path)
    }
    violations = {name for name in importers if not any(fnmatch(name, allowed) for allowed in CONFINED[library])}
    assert not violations, f"{sorted(violations)}: {library} belongs in {CONFINED[library]} only"


def test_no_test_module_imports_another() -> None:
    """Shared helpers are in tests/support, and those of the simulation in its folder."""
    importers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) tests\.\S*\btest_", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not importers


# Imports in a fresh interpreter, which prints the unwanted libraries that were loaded.
IMPORT_ALL = """
import importlib, pkgutil, sys
names, unwanted = sys.argv[1].split(","), sys.argv[2].split(",")
for name in names:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
print(*sorted(set(unwanted) & sys.modules.keys()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("tinkerpool.v1", "torch,transformers,ray,typer,rich,coordinator,workers"),
        ("tinkerpool", "torch,transformers,ray,opentelemetry,coordinator,workers"),
        (
            "workers.contract.capacity,workers.contract.messages,workers.pool.factory",
            "torch,transformers,ray,grpc,sqlite3,coordinator",
        ),
        ("coordinator", "torch,transformers,ray"),
        # Tests start many processes with it.
        ("tests.support.toy_engine", "torch,transformers,ray"),
    ],
)
def test_import_stays_light(modules: str, unwanted: str) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, modules, unwanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"importing {modules} must not load these"


# Runs in a fresh interpreter that cannot find the libraries of the first argument.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')))\n"
TRAIN_A_STEP = """
from pathlib import Path
from tests.support.numerics.harness import Driver, make_data, make_spec
import workers.sampling.sampler
driver = Driver(Path(sys.argv[1]))
driver.install(make_spec("a"))
_, step = driver.train(driver.backward("a", make_data("cross_entropy", [5])), driver.step("a"))
print(step.metrics["update_norm:last"])
"""
LIST_COMMANDS = """
from tinkerpool.cli.app import command_line
print(*command_line().commands)
"""
COLLECT_GPU_TESTS = """
import pytest
if code := pytest.main(["-q", "--collect-only", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "tests/gpu"]):
    sys.exit(code)
"""


def run_without(libraries: str, program: str, *args: str) -> str:
    """Run a program without these libraries; return its output."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + program, libraries, *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def few_libraries(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process with few libraries prints that collects the tests for a GPU, and trains; one torch for both."""
    model = build_mini_model(tmp_path_factory.mktemp("few") / "model", "qwen3")
    program = COLLECT_GPU_TESTS + TRAIN_A_STEP
    return run_without("ray,grpc,coordinator,hypothesis,peft", program, str(model)).splitlines()


@pytest.mark.slow
@pytest.mark.xdist_group("imports")
def test_engine_trains_without_ray_and_grpc(few_libraries: list[str]) -> None:
    assert float(few_libraries[-1]) > 0


@pytest.mark.slow
def test_the_command_line_has_all_commands_without_the_libraries_of_a_pool() -> None:
    libraries = "grpc_health,grpc_reflection,ray,safetensors,starlette,tokenizers,torch,transformers,uvicorn,zstandard"
    listed = run_without(libraries, LIST_COMMANDS).split()
    assert {"up", "down", "pools", "use", "status", "key"} <= set(listed)


@pytest.mark.slow
@pytest.mark.xdist_group("imports")
def test_gpu_tests_are_collected_on_a_machine_with_few_libraries(few_libraries: list[str]) -> None:
    found = "\n".join(few_libraries)
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert path.name in found


@pytest.mark.parametrize("path", sorted((ROOT / "protos").rglob("*.proto")), ids=lambda path: path.stem)
def test_every_file_of_the_contract_names_its_package_for_each_language(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT / "protos").with_suffix("").parts) + "_pb2")
    name, options = path.parent.name, module.DESCRIPTOR.GetOptions()
    assert options.go_package == f"tinkerpool/{name};tinkerpool{name}", "protoc-gen-go refuses a file without it"
    assert (options.java_package, options.java_multiple_files) == (f"tinkerpool.{name}", True)
    assert options.csharp_namespace == f"Tinkerpool.{name.capitalize()}"
    assert options.ruby_package == f"Tinkerpool::{name.capitalize()}"


def test_generated_code_matches_the_protos() -> None:
    python = ROOT / ".venv-protos" / "bin" / "python"
    if not python.exists():
        pytest.skip("the .proto compiler is not installed; `make protos` or `make test` installs it")
    command = [str(python), str(ROOT / "scripts" / "generate_protos.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "is_allowed"),
    [
        ("", "", True),
        ("int64 offset = 3;", "int64 offset = 3;\n  int64 more = 99;", True),
        ("int64 offset = 3;", "", False),
        ("int64 offset = 3;", "int32 offset = 3;", False),
        ("int64 offset = 3;", "int64 offset = 33;", False),
        ("int64 offset = 3;", "int64 position = 3;", False),
        ("DATA_TYPE_INT64 = 3;", "", False),
    ],
)
def test_a_change_of_the_contract_that_breaks_clients_is_refused(
    before: str, after: str, is_allowed: bool, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    changed = tmp_path / "protos" / "tinkerpool" / "v1" / "types.proto"
    assert before in changed.read_text()
    changed.write_text(changed.read_text().replace(before, after, 1))
    command = [str(Path(sys.executable).parent / "buf"), "breaking", "--against", "protos/tinkerpool.binpb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_allowed, done.stdout + done.stderr
