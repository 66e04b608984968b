"""Whether this machine shows a GPU, found out in milliseconds: importing torch, or starting Ray, takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_FILES = ("dev/nvidia*", "dev/nvhost*", "dev/nvgpu*", "dev/dxg", "dev/kfd")
"""What drivers make: NVIDIA's (desktop and Jetson), WSL's, AMD's."""
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_CPU_BUILD = "+cpu"
"""Ending of the version of a torch that was built without CUDA."""


def gpu_problem(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str:
    """Return why no worker can use a GPU of this machine, and how to mend it; empty if nothing shows that."""
    if not any(any(root.glob(pattern)) for pattern in _FILES):
        at = " (no driver has made /dev/nvidia0)" if sys.platform == "linux" else ""
        return f"this machine shows none{at}; install the driver, or give this container a GPU (docker run --gpus all)"
    if environment.get(_VARIABLE) in {"", "-1"}:
        return f"{_VARIABLE}={environment[_VARIABLE]!r} hides those of this machine; unset it"
    if (torch := _torch_version()).endswith(_CPU_BUILD):
        return f"the installed torch {torch} is the build for CPUs; install the one with CUDA"
    return ""


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
