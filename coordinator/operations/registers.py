"""The registers of one epoch: adapters, sessions, operations in flight, and admission over them, put together.

Does not depend on cycles, samples or workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.base.context import Context
from coordinator.operations.admission import Admission
from coordinator.operations.finished_samples import FinishedSamples
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.registry import AdapterRegistry
from coordinator.operations.sessions import SessionTable
from coordinator.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """The state of one epoch by session, adapter and operation."""

    registry: AdapterRegistry
    sessions: SessionTable
    in_flight: InFlightTable
    finished_samples: FinishedSamples
    admission: Admission


def open_registers(context: Context, store: Store) -> Registers:
    """Return the registers, with the live sessions of the last epoch."""
    finished_samples = FinishedSamples(context.epoch)
    in_flight = InFlightTable(finished_samples)
    registry = AdapterRegistry(context.time, store.adapters)
    sessions = SessionTable(store, context.time)
    sessions.load()
    return Registers(
        registry=registry,
        sessions=sessions,
        in_flight=in_flight,
        finished_samples=finished_samples,
        admission=Admission(store, in_flight, registry, context.config.limits),
    )
