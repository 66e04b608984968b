"""Generate the contract's Python code in tinkerpool/ from protos/tinkerpool/.

The generated files are committed, so that installing and reading them needs no compiler. With --check it writes no
file; the exit status is 1 if the committed code does not match the .proto files.

Runs in the environment of `constraints-protos.txt`, which `make protos` sets up.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = "tinkerpool"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Compile every .proto file below `protos/` into `out`. Raises SystemExit if the compiler refuses one."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).rglob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto files below {PROTOS / PACKAGE}")
    # The stub plugins are found through PATH; they are in the folder of this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    well_known_types = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known_types}"]
    arguments += [f"--{plugin}_out={out}" for plugin in ("python", "grpc_python")]
    arguments += [f"--{plugin}_out=quiet:{out}" for plugin in ("mypy", "mypy_grpc")]
    if protoc.main([*arguments, *sources]) != 0:
        raise SystemExit("protoc refused the .proto files; see its messages above")


def generated_files(base: Path) -> dict[str, bytes]:
    """Return the generated files below `base`, by their path relative to it."""
    return {
        path.relative_to(base).as_posix(): path.read_bytes()
        for pattern in GENERATED
        for path in (base / PACKAGE).rglob(pattern)
    }


def main() -> int:
    """Generate or check; return the process's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed code is out of date")
    check = parser.parse_args().check

    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        wanted = generated_files(Path(scratch))
    present = generated_files(ROOT)

    stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if check and stale:
        print("generated code is out of date; run `make protos` and commit the result:", *stale, sep="\n  ")
        return 1
    for name in stale:
        path = ROOT / name
        if name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[name])
        else:
            path.unlink()
    print(f"generated code: {len(wanted)} files, {len(stale)} {'out of date' if check else 'changed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
