"""What all parts of a coordinator share in one epoch: its context, and the registers of its operations.

Does not depend on cycles, samples or workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Failure
from coordinator.base.time import Time
from coordinator.fleet.fleet import Fleet
from coordinator.limits.quotas import Quotas
from coordinator.limits.rates import Rates
from coordinator.observe.throughput import Throughput
from coordinator.operations.admission import Admission
from coordinator.operations.ceilings import Ceilings
from coordinator.operations.history import Entries
from coordinator.operations.holdings import Holdings
from coordinator.operations.in_flight import FinishedSamples, InFlightTable
from coordinator.operations.registry import AdapterRegistry
from coordinator.operations.sessions import SessionTable
from coordinator.operations.spending import Spending
from coordinator.storage.store import Store

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The settings, clock, fatal errors, number and traces of an epoch."""

    config: CoordinatorConfig
    time: Time
    failure: Failure
    epoch: int
    traces: Traces | None
    """None: the pool sends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """The state of one epoch by session, adapter and operation."""

    registry: AdapterRegistry
    sessions: SessionTable
    in_flight: InFlightTable
    finished_samples: FinishedSamples
    admission: Admission
    entries: Entries
    throughput: Throughput
    quotas: Quotas
    holdings: Holdings
    ceilings: Ceilings
    rates: Rates


def open_registers(context: Context, store: Store, fleet: Fleet) -> Registers:
    """Return the registers, with the live sessions of the last epoch."""
    quotas = Quotas(store, context.config.tenant_limits)
    finished_samples = FinishedSamples(context.epoch)
    in_flight = InFlightTable(finished_samples)
    holdings = Holdings(store, fleet)
    registry = AdapterRegistry(context.time, store.adapters, holdings)
    sessions = SessionTable(store, context.time)
    sessions.load()
    rates = Rates(quotas, context.time.monotonic)
    ceilings = Ceilings(quotas, in_flight, sessions, registry, holdings, Spending(store, in_flight, context.time.wall))
    limits, clock = context.config.limits, context.time.monotonic
    return Registers(
        registry=registry,
        sessions=sessions,
        in_flight=in_flight,
        finished_samples=finished_samples,
        admission=Admission(store, in_flight, registry, limits, ceilings, rates, clock, context.traces),
        entries=Entries(context.time, context.traces, are_kept=context.config.history_rows > 0),
        throughput=Throughput(context.time.monotonic),
        quotas=quotas,
        holdings=holdings,
        ceilings=ceilings,
        rates=rates,
    )
