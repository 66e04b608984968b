"""Makes a pool from a `PoolConfig`: `LocalPool` (threads of this process) or `RayPool` (an actor for each worker).

Imports neither torch nor ray by itself; the pool that it makes, and the description of a model, do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from workers.contract.model_descriptions import ModelDescription
from workers.contract.protocols import Engine, EngineFactory, Pool, PoolStartError
from workers.contract.settings import EngineSettings, PoolConfig
from workers.host.gpus import gpu_problem
from workers.model.files import check_files
from workers.pool.environment import ray_environment, worker_environment, worker_of
from workers.pool.loop import engine_factory


def make_pool(config: PoolConfig) -> Pool:
    """Return a pool that is not started yet."""
    engines = config.engines()
    if config.kind == "ray":
        _add_to_environment(ray_environment(config))
        if config.ray_address is None:
            os.environ["RAY_AUTH_MODE"] = "token"  # also where the operator's clusters have none
        from workers.pool.ray_pool import RayPool

        return RayPool(config)
    from workers.pool.local import LocalPool

    if "torch" not in sys.modules:
        _add_to_environment(worker_environment(next(iter(engines.values()))))

    factories = {
        worker_id: _local_factory(config.engine, settings, len(engines)) for worker_id, settings in engines.items()
    }
    num_slots = next(settings.num_slots for settings in engines.values())
    base_models = {worker_id: settings.model_name for worker_id, settings in engines.items()}
    return LocalPool(factories, base_models=base_models, num_slots=num_slots, device=config.device)


def _local_factory(engine: str, settings: EngineSettings, num_workers: int) -> EngineFactory:
    """Return the factory of one of the workers of this process; those on "cuda" take turns in its GPUs, also those that
    are added later.
    """
    if settings.device != "cuda":
        return engine_factory(engine, settings)

    def make_engine(incarnation: str) -> Engine:
        import torch

        num_gpus = max(1, torch.cuda.device_count())
        position = int(worker_of(incarnation).removeprefix("w"))
        gpu = position % num_gpus
        num_beside = len(range(gpu, max(num_workers, position + 1), num_gpus))
        torch.cuda.set_device(gpu)  # of this thread, the engine's
        own = replace(settings, device=f"cuda:{gpu}", memory_share=1 / num_beside)
        return engine_factory(engine, own)(incarnation)

    return make_engine


def check_host(config: PoolConfig) -> None:
    """Raise PoolStartError for what the workers lack on this machine, as far as it shows without torch and Ray.

    The nodes of a cluster have their own models and GPUs: nothing is checked then.
    """
    if config.ray_address is not None:
        return
    for model in config.models:
        try:
            check_files(model.path)
        except (OSError, ValueError) as error:  # ValueError: no name of the hub
            raise PoolStartError(str(error)) from None
    _check_gpu(config)


def _check_gpu(config: PoolConfig) -> None:
    """Raise PoolStartError if the workers need a GPU that this machine lacks."""
    if config.device.startswith("cuda") and (problem := gpu_problem()):
        raise PoolStartError(
            f"workers on {config.device} need a GPU: {problem}; or leave out --gpus and --device, to run on CPUs"
        )


def describe_model(config: PoolConfig) -> ModelDescription:
    """Return what a worker would make of a pool's first base model, without reading weights.

    Imports torch and transformers. Raises PoolStartError without the GPU that the worker needs, OSError and
    ValueError if there is no config of the model that can be read.
    """
    _check_gpu(config)
    from workers.pool.description import describe

    return describe(next(iter(config.engines().values())))


def _add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables that the operator has not set."""
    os.environ |= {name: value for name, value in variables.items() if name not in os.environ}


def remove_leftovers(owner_file: Path) -> None:
    """End the private Ray of a killed process, which `PoolConfig.owner_file` names; do nothing without that file."""
    if owner_file.exists():
        from workers.pool.ray_host import remove_leftovers as remove

        remove(owner_file)
