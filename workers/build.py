"""Puts the real engine together in the process that will run it: base model, bank and sampler.

The one module that a worker names to get all of torch; a pool names it by an import string (`PoolConfig.engine`).
"""

from __future__ import annotations

from workers import engine
from workers.pool import EngineFactory, EngineSettings
from workers.sampler import Sampler


def engine_factory(settings: EngineSettings) -> EngineFactory:
    """A factory of the real engine."""
    config = engine.EngineConfig(
        model=settings.model_path,
        model_name=settings.model_name,
        num_slots=settings.num_slots,
        num_threads=settings.num_threads,
        device=settings.device,
        recompute=settings.recompute,
        memory_share=settings.memory_share,
        dtype=settings.dtype,
        exact=settings.exact,
    )
    return engine.engine_factory(config, Sampler)
