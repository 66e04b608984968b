"""Builds and loads the guard, a small C++ library. Imports no torch: the guard must be loaded before it.

Main invariant: a built guard fits the torch it was built with; another version gets a guard of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).resolve().parents[3] / "build" / "fake-cuda"
COMPILER = os.environ.get("CXX", "g++")
CPU_BUILD = "+cpu"
"""Ending of the version of a torch without CUDA; a torch with CUDA has a guard and hooks of its own."""


class NoGuardError(RuntimeError):
    """This machine cannot pretend to have a GPU; the message says why."""


def problem() -> str:
    """Return why the guard cannot be built here; empty if it can."""
    if not version("torch").endswith(CPU_BUILD):
        return f"torch {version('torch')} is not the build for CPUs, which the fake CUDA device needs"
    if shutil.which(COMPILER) is None and not _library().exists():
        return f"there is no C++ compiler ({COMPILER}) to build the fake CUDA device with"
    return ""


def load() -> None:
    """Load the guard, and build it first where that has not happened yet. Raises NoGuardError."""
    if why := problem():
        raise NoGuardError(why)
    if "torch" in sys.modules:
        raise NoGuardError("torch is imported already; the fake CUDA device needs a process of its own")
    libraries = _torch() / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_built()), ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _library() -> Path:
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return CACHE / f"guard-{version('torch')}-{source}.so"


def _built() -> Path:
    """Return the built library. Processes that build it at once do not disturb each other."""
    library, torch = _library(), _torch()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [COMPILER, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE)]
        command += ["-o", str(built), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoGuardError(f"the fake CUDA device does not compile:\n{done.stderr}")
        built.replace(library)
    return library
