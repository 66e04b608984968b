"""Environment variables that a worker process needs before it imports torch or ray, and names for lives of workers."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from workers.contract.settings import PoolConfig

SPIN_COUNT = 10_000
"""How long an idle OpenMP thread spins before it sleeps. Unbounded spinning is several times slower on busy cores, none
at all twice as slow on quiet ones."""


KERNELS_MAX = 512
"""Kernels that oneDNN keeps, of 0.6 MB each; see `frozen`. Numbers of rows that come often are few."""


def new_incarnation(worker_id: str) -> str:
    """A name for a life of a worker that no life has had, in this process or an earlier one."""
    return f"{worker_id}-{secrets.token_hex(6)}"


def thread_environment(num_threads: int) -> dict[str, str]:
    """The environment of a worker process. It must be set before torch is imported."""
    threads = str(num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS_MAX),
    }


def ray_environment(config: PoolConfig) -> dict[str, str]:
    """What Ray reads when it is imported: no call starts a Ray by itself, and a token that we have is shown.

    Ray itself shows its token to a cluster only if told so; one that asks for none does not mind.
    """
    environment = {"RAY_ENABLE_AUTO_CONNECT": "0"}
    has_token = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if config.ray_address is not None and (has_token or (Path.home() / ".ray" / "auth_token").exists()):
        environment["RAY_AUTH_MODE"] = "token"
    return environment
