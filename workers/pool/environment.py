"""Environment variables that a worker process needs before it imports torch or ray, and names of incarnations."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from workers.contract.settings import EngineSettings, PoolConfig

SPIN_COUNT = 10_000
"""How long an idle OpenMP thread spins before it sleeps. Unbounded spinning is several times slower on busy cores, none
at all twice as slow on quiet ones."""
KERNELS_MAX = 512
"""Kernels that oneDNN keeps, of 0.6 MB each; see `model.frozen_products`. Few numbers of rows are frequent."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the variable with the settings of the allocator on a GPU, today's and an older one."""
ALLOCATOR_SETTINGS = "expandable_segments:True"
"""Blocks grow in place. Every pass has other sizes, and would leave gaps between blocks of fixed sizes."""


def new_incarnation(worker_id: str) -> str:
    """Return a name for an incarnation of a worker that is unique across processes."""
    return f"{worker_id}-{secrets.token_hex(6)}"


def worker_of(incarnation: str) -> str:
    """Return the worker whose incarnation has this name."""
    return incarnation.rpartition("-")[0]


def thread_environment(num_threads: int | None) -> dict[str, str]:
    """Return what kernels on a CPU read when torch is imported."""
    environment = {"GOMP_SPINCOUNT": str(SPIN_COUNT), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS_MAX)}
    if num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    return environment


def worker_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment of a worker process, to be set before torch is imported."""
    environment = thread_environment(settings.num_threads)
    if settings.device.startswith("cuda") and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS
    return environment


def ray_environment(config: PoolConfig) -> dict[str, str]:
    """Return the variables that Ray reads when it is imported.

    With them no call starts a Ray by itself. A private Ray asks for a token, and listens on the loopback only: that is
    what Ray does where it supports one machine only, and this variable is its one switch for that. A token that exists
    is sent to a cluster. Ray sends it only if told to; a cluster without authentication ignores it.
    """
    environment = {"RAY_ENABLE_AUTO_CONNECT": "0"}
    if config.ray_address is None:
        return environment | {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    has_token = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or (Path.home() / ".ray" / "auth_token").exists():
        environment["RAY_AUTH_MODE"] = "token"
    return environment
