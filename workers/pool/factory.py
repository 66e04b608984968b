"""Make a pool from a `PoolConfig`: `LocalPool` (threads of this process) or `RayPool` (an actor per worker).

Imports neither torch nor ray by itself; the pool that is made does. Both pools drive their engines with `EngineLoop`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import cast

from workers.contract.protocols import Engine, EngineFactory, Pool
from workers.contract.settings import EngineSettings, PoolConfig
from workers.pool.environment import ray_environment, thread_environment


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
        from workers.pool.ray_pool import RayPool

        return RayPool(config)
    from workers.pool.local import LocalPool

    if "torch" not in sys.modules:
        threads = max(settings.num_threads for settings in engines.values())
        _add_to_environment(thread_environment(threads))

    factories = {worker_id: engine_factory(config.engine, settings) for worker_id, settings in engines.items()}
    num_slots = next(settings.num_slots for settings in engines.values())
    return LocalPool(factories, num_slots=num_slots, device=config.device)
