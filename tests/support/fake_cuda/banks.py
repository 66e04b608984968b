"""An engine's bank of real shapes on the fake device."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.bench.gpu_count.cases import ALL_KINDS, engine_of
from workers.contract.messages import AdapterSpec


def bytes_of(name: str, ranks: Sequence[int], *, free_bytes: int) -> tuple[int, int]:
    """Add adapters of these ranks to the bank of an engine with a model of a named shape, and acquire one by one.

    Returns the bytes that the bank takes, and the adapters that are resident.
    """
    with engine_of(name, free_bytes=free_bytes, cache_bytes_max=0) as (engine, _):
        for number, rank in enumerate(ranks):
            key = f"adapter-{number}"
            engine.bank.add(key, AdapterSpec(adapter_id=key, rank=rank, alpha=32.0, seed=number, **ALL_KINDS))
            engine.bank.acquire([key])
        return engine.bank.device_bytes, engine.bank.num_resident
