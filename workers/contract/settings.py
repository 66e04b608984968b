"""Settings of a pool and of the engine on each of its workers: the one place where they are defined."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from workers.contract.logs import LogConfig

SHIPPED_MODELS_DIR = Path(__file__).parents[1] / "models"
"""The base models that come with tinkerpool."""
ENGINE = "workers.engine:engine_factory"
CPU_SLOTS, DEVICE_SLOTS = 64, 16
"""Default bank slots on a CPU and on other devices. A CPU's slots are host memory, like the place of evicted adapters;
and a cycle with more adapters than slots moves all of them in and out."""

CACHE_SHARE = 0.25
CPU_CACHE_BYTES_MAX = 2 << 30
"""Default part of the free memory for keys and values of samples, and the most bytes of it on a CPU."""

Recompute = Literal["off", "on", "auto"]
Dtype = Literal["auto", "bfloat16", "float32"]
LinearAttention = Literal["own", "fla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine: one base model on one device. A pool derives them from its `PoolConfig`."""

    model_path: str
    """A Hugging Face directory of a causal language model, or a name in the local hub cache."""
    model_name: str = ""
    """The name that users ask for; empty: `model_path`."""
    num_slots: int = DEVICE_SLOTS
    """Slots of the bank: adapters and sampler versions that are resident at a time. More are held in host memory."""
    num_threads: int | None = None
    """Most threads of the library's kernels; None: as many as the process has set. Part of the fingerprint. Passes and
    decode steps take fewer while other processes use the cores, if their bits do not depend on the number."""
    device: str = "cpu"
    """Torch device."""
    dtype: Dtype = "auto"
    """Of the base model's weights and activations; adapters, moments and gradients are fp32. "auto": bfloat16 on cuda,
    float32 on a CPU. Part of the fingerprint."""
    exact: bool = False
    """An adapter's bits in training depend on no neighbour on any device, at a cost in speed; on a CPU in float32 they
    never do. Part of the fingerprint."""
    linear_attention: LinearAttention = "own"
    """What computes the gated delta rule in passes of a hybrid: the engine, or the package `fla` on a GPU in bfloat16,
    if it passes a trial and `exact` is off. Part of the fingerprint."""
    pass_tokens_max: int = 8192
    """Most rows of one packed pass; fewer where memory is short. Longer runs of items are cut. Changes no bits."""
    recompute: Recompute = "auto"
    """Whether layers run again in the backward instead of keeping their activations (gradient checkpointing): a third
    slower, and far longer sequences fit. "auto": passes that would not fit otherwise. Changes no bits."""
    memory_share: float = 1.0
    """The part of the free memory that this engine may take; above 0, at most 1."""
    host_bytes_max: int = 0
    """Most bytes of host memory for copies of adapters and sampler versions, which the coordinator keeps within it; 0:
    half of `host_share` of what is free when the model is loaded."""
    host_share: float = 1.0
    """The part of the machine's free memory that is this engine's; above 0, at most 1."""
    cache_share: float = CACHE_SHARE
    """The part of the free memory for keys and values of samples, when the model is loaded; above 0, below 1. At least
    one block is taken."""
    cache_bytes_max: int | None = CPU_CACHE_BYTES_MAX
    """Most bytes of keys and values of samples; None: `cache_share` alone limits them."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "pass_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at least 1, or None")
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute is {self.recompute!r}; it must be 'off', 'on' or 'auto'")
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'auto', 'bfloat16' or 'float32'")
        if self.linear_attention not in get_args(LinearAttention):
            raise ValueError(f"linear_attention is {self.linear_attention!r}; it must be 'own' or 'fla'")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share is {self.memory_share}; it must be above 0 and at most 1")
        if not 0 < self.cache_share < 1:
            raise ValueError(f"cache_share is {self.cache_share}; it must be above 0 and below 1")
        for name in ("cache_bytes_max", "host_bytes_max"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """One base model and its workers."""

    name: str
    """The name that users ask for."""
    path: str
    """A Hugging Face directory, or a name in the local hub cache, on every node that may run its workers."""
    num_workers: int = 1
    """Workers of this base model."""

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
    """"ray": every worker is a process, an actor of Ray. "local": every worker is a thread of this process."""
    num_slots: int = 0
    """Adapters and sampler versions in each worker's bank at a time; more are held in the worker's host memory. 0: 64
    on a CPU, 16 on other devices."""
    num_threads: int = 0
    """Threads of each worker; 0: this machine's cores divided by the workers, or `num_cpus` on a cluster."""
    num_cpus: float = 1.0
    """CPUs that each worker claims from Ray, for placement on a cluster; 0 claims none. It limits nothing."""
    num_gpus: float = 0.0
    """GPUs that each worker claims from Ray and may use; a fraction shares one. 0: none."""
    host_bytes_max: int = 0
    """Bytes of host memory that each worker takes for copies of adapters and sampler versions; beyond that the least
    recently used ones are kept on disk alone. 0: half of its part of the free memory."""
    cache_share: float = 0.0
    """The part of a worker's free memory, when its model is loaded, for keys and values of samples; below 1. 0: a
    quarter, and on a CPU 2 GiB at most."""
    device: str = "cpu"
    """Torch device of each worker. With Ray, "cuda" is the GPU that the worker has claimed."""
    recompute: Recompute = "auto"
    """Whether layers run again in the backward instead of keeping their activations (gradient checkpointing), which
    takes a third longer and far less memory; "auto": where a pass would not fit otherwise."""
    dtype: Dtype = "auto"
    """Of the base models' weights and activations; adapters are fp32. "auto": bfloat16 on cuda, float32 on a CPU."""
    exact: bool = False
    """An adapter's bits in training depend on no neighbour, also on cuda and in bfloat16, at a cost in speed."""
    linear_attention: LinearAttention = "own"
    """What computes linear attention in a hybrid's passes: "own", the pool's code; "fla", the kernels of the package of
    that name, on a GPU in bfloat16, if they pass a trial when the model is loaded. They have not been run yet."""
    ray_address: str | None = None
    """A Ray cluster to join, `host:port`, its token in `RAY_AUTH_TOKEN` or `~/.ray/auth_token`; None: a private one on
    this machine, which ends with the pool."""
    ray_temp_dir: str | None = None
    """Folder of the private Ray's sockets and logs, a short path; None: a temporary folder, removed at the end."""
    owner_file: Path | None = None
    """File in which a private Ray records its processes and folder, so that the next start with this file removes them
    if this process is killed; a stop removes the file. One pool at a time. None: a kill leaves them behind."""
    spool_folder: Path | None = None
    """Folder on the disk that takes large states on their way from workers to files, in files without names; None: the
    one for temporary files."""
    keep_workers: bool = False
    """Whether workers on a cluster outlive a stop by SIGTERM, as they outlive a crash: the next start on the data
    directory takes them over, with their models loaded. Ctrl-C, SIGHUP and `tinkerpool down` always end them."""
    lease_s: float = 900.0
    """Seconds after which a worker on a cluster ends if it hears from no coordinator."""
    start_timeout_s: float = 600.0
    """Most seconds for a worker to get its resources and load its model."""
    log: LogConfig = field(default_factory=LogConfig)
    """What the pool's processes log, and how. Workers that the next coordinator takes over go on as they began."""
    engine: str = ENGINE
    """`module:attribute` of a function from `EngineSettings` to an `EngineFactory`, imported by the worker."""

    def __post_init__(self) -> None:
        if self.kind not in {"ray", "local"}:
            raise ValueError(f"kind is {self.kind!r}; it must be 'ray' or 'local'")
        names = [model.name for model in self.models]
        if not names:
            raise ValueError("a pool needs at least one model")
        if len(set(names)) < len(names):
            raise ValueError(f"each model needs a name of its own, got {', '.join(names)}")
        for name in ("num_slots", "num_threads", "num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.kind == "ray" and self.device.startswith("cuda") != (self.num_gpus > 0):
            raise ValueError(
                f"device is {self.device!r} and num_gpus is {self.num_gpus:g}; workers on cuda need num_gpus (a "
                "fraction shares a GPU), and others need 0"
            )
        for name in ("start_timeout_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.keep_workers and self.ray_address is None:
            raise ValueError("keep_workers is for workers on a cluster (ray_address); a private Ray ends with its pool")
        if self.ray_address is not None and self.ray_temp_dir is not None:
            raise ValueError("ray_temp_dir is for a private Ray; a cluster (ray_address) has its own")
        module, _, attribute = self.engine.partition(":")
        if not module or not attribute:
            raise ValueError(f"engine is {self.engine!r}; it must be 'module:attribute'")
        self.engines()  # an engine's settings check themselves

    @property
    def num_workers(self) -> int:
        """Return the number of workers of all models together."""
        return sum(model.num_workers for model in self.models)

    @property
    def summary(self) -> str:
        """Return what the workers serve, for people: `kjv-2m on 2 workers`."""
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{', '.join(model.name for model in self.models)} on {workers}"

    @property
    def claim(self) -> str:
        """Return what each worker claims, for people."""
        return f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs claimed for each worker"

    def engines(self) -> dict[str, EngineSettings]:
        """Return the settings of each worker's engine, by worker id."""
        models = [model for model in self.models for _ in range(model.num_workers)]
        is_cpu = self.device.partition(":")[0] == "cpu"
        default_slots = CPU_SLOTS if is_cpu else DEVICE_SLOTS
        return {
            f"w{index}": EngineSettings(
                model_name=model.name,
                model_path=model.path,
                num_slots=self.num_slots or default_slots,
                num_threads=self._threads(),
                device=self.device,
                recompute=self.recompute,
                memory_share=self._memory_share(),
                host_bytes_max=self.host_bytes_max,
                host_share=self._host_share(),
                cache_share=self.cache_share or CACHE_SHARE,
                cache_bytes_max=CPU_CACHE_BYTES_MAX if is_cpu and not self.cache_share else None,
                dtype=self.dtype,
                exact=self.exact,
                linear_attention=self.linear_attention,
            )
            for index, model in enumerate(models)
        }

    def _memory_share(self) -> float:
        """Return a worker's part of its device's memory."""
        if self.kind == "ray" and self.device.startswith("cuda"):
            return min(1.0, self.num_gpus)
        return self._host_share()

    def _host_share(self) -> float:
        """Return a worker's part of its machine's memory. On a cluster that is unknown: all of it."""
        return 1.0 if self.ray_address is not None else 1 / self.num_workers

    def _threads(self) -> int:
        if self.num_threads:
            return self.num_threads
        if self.ray_address is not None:
            return max(1, int(self.num_cpus))
        return max(1, num_cores() // self.num_workers)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
