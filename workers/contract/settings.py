"""Settings of a pool and of the engine on each of its workers: the one place where they are defined."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SHIPPED_MODELS_DIR = Path(__file__).parents[1] / "models"
"""The base models that come with tinkerpool."""
ENGINE = "workers.pool.build:engine_factory"


SLOTS = defaultdict(lambda: 16, cpu=64)
"""Slots of a bank, by the kind of device. A CPU's slots are host memory, where what is evicted would go as well; and a
cycle with more adapters than slots moves all of them in and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a worker process is told about the engine that it shall make."""

    model_name: str
    """The name that users ask for."""
    model_path: str
    """A Hugging Face directory, or a name in the local hub cache."""
    num_slots: int
    """Adapters and sampler versions in its bank at once."""
    num_threads: int
    """Threads of the library's kernels."""
    device: str
    recompute: Literal["off", "on", "auto"] = "auto"
    """Whether layers run again in the backward instead of keeping what they computed."""
    memory_share: float = 1.0
    """The part of the free memory that is this worker's."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """One base model and its workers."""

    name: str
    """The name that users ask for."""
    path: str
    """A Hugging Face directory, or a name in the local hub cache, on every node that may run its workers."""
    num_workers: int = 1
    """Workers per base model."""

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise ValueError("a model needs a name and a path")
        if self.num_workers < 1:
            raise ValueError(f"{self.name}: num_workers is {self.num_workers}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Settings of a pool."""

    models: tuple[PoolModel, ...]
    """The base models, each under its own name."""
    kind: Literal["ray", "local"] = "ray"
    """How workers run. ray: each is a process, an actor of Ray. local: they are threads of this process."""
    num_slots: int = 0
    """Adapters and sampler versions in the bank of each worker at once; more are kept in its host memory. 0: 64 on a
    CPU, 16 on a GPU."""
    num_threads: int = 0
    """Threads of each worker. 0: this machine's cores divided by the workers; on a cluster, the CPUs it claims."""
    num_cpus: float = 1.0
    """CPUs that each worker claims from Ray, for placement on a cluster. 0: none. This limits nothing."""
    num_gpus: float = 0.0
    """GPUs that each worker claims from Ray and may use; a fraction shares one. 0: none."""
    device: str = "cpu"
    """Torch device of each worker. With Ray, cuda is the GPU that the worker claimed."""
    recompute: Literal["off", "on", "auto"] = "auto"
    """Whether layers run again in the backward pass instead of keeping their activations (gradient checkpointing),
    which takes a third longer and far less memory. auto: where a pass would not fit otherwise."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the base models' weights and activations; adapters are float32. auto: bfloat16 on cuda, float32 on a
    CPU."""
    exact: bool = False
    """The bits of an adapter's training never depend on co-batched tenants, also on cuda and in bfloat16; slower."""
    ray_address: str | None = None
    """Ray cluster to join, host:port; its token is in RAY_AUTH_TOKEN or ~/.ray/auth_token. None: a private one on this
    machine, which ends with the pool."""
    ray_temp_dir: str | None = None
    """Where the private Ray keeps sockets and logs, a short path; None: a temporary folder, removed at the end."""
    owner_file: Path | None = None
    """Where a private Ray notes what it has on this machine, so that the next start on the file removes it if this
    process is killed; the file is gone after a stop. One pool at a time. None: what a kill leaves behind stays."""
    start_timeout_s: float = 600.0
    """How long a worker may take to get its resources and load its model."""
    engine: str = ENGINE
    """`module:attribute` of a function from `EngineSettings` to an `EngineFactory`, imported by the worker."""

    def __post_init__(self) -> None:
        if self.kind not in {"ray", "local"}:
            raise ValueError(f"kind is {self.kind!r}; it must be 'ray' or 'local'")
        if self.dtype not in {"auto", "bfloat16", "float32"}:
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'auto', 'bfloat16' or 'float32'")
        names = [model.name for model in self.models]
        if not names:
            raise ValueError("a pool needs at least one model")
        if len(set(names)) < len(names):
            raise ValueError(f"each model needs a name of its own, got {', '.join(names)}")
        if self.recompute not in {"off", "on", "auto"}:
            raise ValueError(f"recompute is {self.recompute!r}; it must be 'off', 'on' or 'auto'")
        for name in ("num_slots", "num_threads", "num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.kind == "ray" and self.device.startswith("cuda") != (self.num_gpus > 0):
            raise ValueError(
                f"device is {self.device!r} and num_gpus is {self.num_gpus:g}; workers on cuda need num_gpus (a "
                "fraction shares a GPU), and others need 0"
            )
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s is {self.start_timeout_s}; it must be above 0")
        if self.ray_address is not None and self.ray_temp_dir is not None:
            raise ValueError("ray_temp_dir is for a private Ray; a cluster (ray_address) has its own")
        module, _, attribute = self.engine.partition(":")
        if not module or not attribute:
            raise ValueError(f"engine is {self.engine!r}; it must be 'module:attribute'")

    @property
    def num_workers(self) -> int:
        """Of all models together."""
        return sum(model.num_workers for model in self.models)

    def engines(self) -> dict[str, EngineSettings]:
        """What runs on each worker, by worker id."""
        models = [model for model in self.models for _ in range(model.num_workers)]
        return {
            f"w{index}": EngineSettings(
                model_name=model.name,
                model_path=model.path,
                num_slots=self.num_slots or SLOTS[self.device.partition(":")[0]],
                num_threads=self._threads(),
                device=self.device,
                recompute=self.recompute,
                memory_share=self._memory_share(),
                dtype=self.dtype,
                exact=self.exact,
            )
            for index, model in enumerate(models)
        }

    def _memory_share(self) -> float:
        """Of the machine that the workers share, or of the GPU; nobody knows who shares a node of a cluster."""
        if self.kind == "ray" and self.device.startswith("cuda"):
            return min(1.0, self.num_gpus)
        return 1.0 if self.ray_address is not None else 1 / self.num_workers

    def _threads(self) -> int:
        if self.num_threads:
            return self.num_threads
        if self.ray_address is not None:
            return max(1, int(self.num_cpus))
        return max(1, num_cores() // self.num_workers)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
