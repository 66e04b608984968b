"""Makes a pool from a `PoolConfig`: `LocalPool` (threads of this process) or `RayPool` (an actor for each worker).

Imports neither torch nor ray by itself; the pool that it makes does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from workers.contract.protocols import Pool, PoolStartError
from workers.contract.settings import PoolConfig
from workers.host.gpus import gpu_problem
from workers.model.files import check_files
from workers.pool.environment import ray_environment, thread_environment
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
        threads = max(settings.num_threads or 0 for settings in engines.values()) or None
        _add_to_environment(thread_environment(threads))

    factories = {worker_id: engine_factory(config.engine, settings) for worker_id, settings in engines.items()}
    num_slots = next(settings.num_slots for settings in engines.values())
    base_models = {worker_id: settings.model_name for worker_id, settings in engines.items()}
    return LocalPool(factories, base_models=base_models, num_slots=num_slots, device=config.device)


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
    if config.device.startswith("cuda") and (problem := gpu_problem()):
        raise PoolStartError(
            f"workers on {config.device} need a GPU: {problem}; or leave out --gpus and --device, to run on CPUs"
        )


def _add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables that the operator has not set."""
    os.environ |= {name: value for name, value in variables.items() if name not in os.environ}


def remove_leftovers(owner_file: Path) -> None:
    """End the private Ray of a killed process, which `PoolConfig.owner_file` names; do nothing without that file."""
    if owner_file.exists():
        from workers.pool.ray_host import remove_leftovers as remove

        remove(owner_file)
