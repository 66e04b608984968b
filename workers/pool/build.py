"""Puts the real engine together in the process that will run it: base model, bank and sampler.

The one module that a worker names to get all of torch; a pool names it by an import string (`PoolConfig.engine`).
"""

from __future__ import annotations

from workers import engine
from workers.bank.bank import Bank
from workers.contract.protocols import EngineFactory
from workers.contract.settings import EngineSettings
from workers.host.host_memory import free_bytes
from workers.model.base_model import BaseModel
from workers.sampling.sampler import Sampler


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

    def make_sampler(base_model: BaseModel, bank: Bank) -> Sampler:
        return Sampler(base_model, bank, free_bytes=lambda device: int(settings.memory_share * free_bytes(device)))

    return engine.engine_factory(config, make_sampler)
