"""The pool as the coordinator sees it, and the engine as a pool sees it: two seams, no torch, no ray at import time.

`LocalPool` (`workers.local`) runs an engine in this process; `RayPool` (`workers.ray_pool`) runs one per Ray actor.
Both drive their engines with the same `workers.loop.EngineLoop`. `make_pool` makes either from a `PoolConfig`.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from workers.messages import Batch, BatchResult, ModelInfo, SampleEvent, SampleRequest, WorkerInfo


class WorkerLost(Exception):
    """The worker died, hangs or cannot be reached. What it was doing may have happened or not; its state is gone."""


class PoolStartError(Exception):
    """The pool cannot start as it is configured; the message says what to change."""


class Engine(Protocol):
    """One warm base model. One thread only; raises nothing for a tenant's mistake (see `ItemResult.error`)."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the base model, constant for the engine's life."""

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch to its end and return one result per item."""

    def start_sample(self, request: SampleRequest) -> None:
        """Forget its `removals` and queue it; it makes progress in `decode_step`. Errors come as its `SampleResult`."""

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; a `SampleResult` with `CANCELLED` follows. Unknown ids are ignored (it just finished)."""

    def decode_step(self) -> Sequence[SampleEvent]:
        """Advance every running sequence by one token, in one forward; returns what happened, in order."""

    def can_decode(self) -> bool:
        """Whether `decode_step` has anything to do."""


EngineFactory = Callable[[str], Engine]
"""Takes the worker's incarnation; called on the thread (and in the process) that will own the engine."""


class Pool(Protocol):
    """Workers, each with one warm base model. The coordinator supervises; a pool restarts nothing by itself."""

    async def start(self) -> None:
        """Start every configured worker and wait until each has its base model loaded. Raises PoolStartError."""

    async def stop(self) -> None:
        """End every worker and whatever else `start` created. Idempotent."""

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers as last started, in a fixed order; a dead one stays listed until it is replaced."""

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch on one worker, one at a time per worker. Raises `WorkerLost`."""

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request; its events appear in `sample_events`. Raises `WorkerLost`."""

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Ask a worker to stop a request. Raises `WorkerLost`."""

    def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """The worker's one stream of sample events; ends by raising `WorkerLost` when that life of it ends."""

    async def ping(self, worker_id: str) -> None:
        """Answered by the worker beside its work, not behind it. Raises `WorkerLost`."""

    async def replace(self, worker_id: str) -> WorkerInfo:
        """Kill what is left of a worker and start its next life, empty. Raises `WorkerLost` if that fails too."""


ENGINE = "workers.build:engine_factory"
SLOTS = defaultdict(lambda: 16, cpu=64)
"""Slots of a bank, by the kind of device. A CPU's slots are host memory, where what is evicted would go as well; and a
cycle with more adapters than slots moves all of them in and out."""
SPIN_COUNT = 10_000
"""How long an idle OpenMP thread spins before it sleeps. Unbounded spinning is several times slower on busy cores, none
at all twice as slow on quiet ones."""
KERNELS_MAX = 512
"""Kernels that oneDNN keeps, of 0.6 MB each; see `frozen`. Numbers of rows that come often are few."""


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

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise ValueError("a model needs a name and a path")
        if self.num_workers < 1:
            raise ValueError(f"{self.name}: num_workers is {self.num_workers}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Settings of a pool."""

    models: tuple[PoolModel, ...]
    kind: Literal["ray", "local"] = "ray"
    """"ray": every worker is a process, an actor of Ray. "local": all of them are threads of this process."""
    num_slots: int = 0
    """Adapters and sampler versions in the bank of each worker at once; more wait in its host memory. 0: as many as
    `SLOTS` has for the kind of device."""
    num_threads: int = 0
    """Threads of each worker; 0: this machine's cores divided by the workers, or `num_cpus` on a cluster."""
    num_cpus: float = 1.0
    """CPUs that each worker claims from Ray, for placement on a cluster; 0 claims none. It limits nothing."""
    num_gpus: float = 0.0
    """GPUs that each worker claims from Ray and may use; a fraction shares one. 0: none."""
    device: str = "cpu"
    """Torch device of each worker. With Ray, "cuda" is the GPU that the worker has claimed."""
    recompute: Literal["off", "on", "auto"] = "auto"
    """Whether layers run again in the backward instead of keeping what they computed (gradient checkpointing), which
    takes a third longer and far less memory; "auto": where a pass would not fit otherwise."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the base models' weights and activations; adapters are fp32. "auto": bfloat16 on cuda, float32 on a CPU."""
    exact: bool = False
    """An adapter's bits in training depend on no neighbour, also on cuda and in bfloat16, at a cost in speed."""
    ray_address: str | None = None
    """A Ray cluster to join, `host:port`, its token in `RAY_AUTH_TOKEN` or `~/.ray/auth_token`; None: a private one on
    this machine, which ends with the pool."""
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


def new_incarnation(worker_id: str) -> str:
    """A name for a life of a worker that no life has had, in this process or an earlier one."""
    return f"{worker_id}-{secrets.token_hex(6)}"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _add_to_environment(variables: Mapping[str, str]) -> None:
    """Where the operator has set nothing else."""
    os.environ |= {name: value for name, value in variables.items() if name not in os.environ}


def engine_factory(path: str, settings: EngineSettings) -> EngineFactory:
    """A factory that imports `module:attribute` when it is called, where the engine will live, and asks it."""

    def make_engine(incarnation: str) -> Engine:
        module, _, attribute = path.partition(":")
        make = cast("Callable[[EngineSettings], EngineFactory]", getattr(importlib.import_module(module), attribute))
        return make(settings)(incarnation)

    return make_engine


def make_pool(config: PoolConfig) -> Pool:
    """A pool that is not started yet."""
    engines = config.engines()
    if config.kind == "ray":
        _add_to_environment(ray_environment(config))
        from workers.ray_pool import RayPool

        return RayPool(config)
    from workers.local import LocalPool

    if "torch" not in sys.modules:
        threads = max(settings.num_threads for settings in engines.values())
        _add_to_environment(thread_environment(threads))

    factories = {worker_id: engine_factory(config.engine, settings) for worker_id, settings in engines.items()}
    num_slots = next(settings.num_slots for settings in engines.values())
    return LocalPool(factories, num_slots=num_slots, device=config.device)
