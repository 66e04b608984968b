"""The loss of a worker, as one atomic record.

`LossRecorder` takes these steps without an await in between: mark the incarnation lost and collect the operations in
flight there (training and samples together); drop every adapter copy there; decide the quarantine; fail a poison
training operation and put its tenant on probation; then publish one event. Receivers read their events before their
next dispatch. Operations of a tenant on probation are in no quarantine, because they run solo anyway; operations that
were in flight beside one are not suspected.

Depends on the fleet and adapter logs; not on how a loss was noticed, or on how the worker is replaced. Main invariant:
an incarnation is recorded as lost at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.base.errors import Code, ServiceError
from coordinator.base.time import Time
from coordinator.checkpoints.published_weights import Publishing
from coordinator.fleet.fleet import Fleet, Flight, Incarnation
from coordinator.observe.metrics import WORKER_LOSSES
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Operation, service_error
from coordinator.operations.registry import AdapterRegistry
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import SOLO_LOSSES_MAX, Quarantine
from coordinator.scheduling.solo_turns import SoloTurns
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.logs import about

logger = logging.getLogger(__name__)


class LossKind(Enum):
    """How a loss was noticed."""

    DIED = "it has died"
    """Its process has ended, or its engine has failed."""
    OVERDUE = "it did not reply to a batch in time"
    SILENT = "it did not reply to a ping in time"
    """No death of its process is known: it may be cut off, and run on."""
    LEFT = "its host leaves"
    """The coordinator ends it: nothing that was in flight there is suspected."""


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """An incarnation of a worker is lost."""

    worker_id: str
    samples: tuple[Flight, ...]
    """Samples that were in flight there, also those that were not sent yet."""
    poison: str
    """The operation that is the poison; empty: not decided by this loss."""
    probation: str = ""
    """The probation of the poison's tenant, for its owner; empty without one."""
    is_blameless: bool = False
    """It was lost in a solo turn of a tenant on probation, which limits how often that happens, or its host leaves."""
    unproven: tuple[Incarnation, ...] = ()
    """The other live workers, if the quarantine waits until they were asked whether they live; see `checked`."""


class LossFeed:
    """The losses that one receiver has not read. Their number is bounded by that of incarnations."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._losses: deque[WorkerLoss] = deque()
        self._wake = wake

    def put(self, loss: WorkerLoss) -> None:
        """Publish a loss and wake the receiver."""
        self._losses.append(loss)
        self._wake.set()

    def take(self) -> list[WorkerLoss]:
        """Return the losses since the last call, in order."""
        losses = list(self._losses)
        self._losses.clear()
        return losses


class LossRecorder:
    """Declares workers lost; no other code does."""

    def __init__(
        self,
        fleet: Fleet,
        registry: AdapterRegistry,
        quarantines: Mapping[str, Quarantine],
        turns: Mapping[str, SoloTurns],
        probation: Probation,
        publishing: Publishing,
        time: Time,
    ) -> None:
        self._fleet = fleet
        self._time = time
        self._registry = registry
        self._quarantines = quarantines
        self._turns = turns
        self._probation = probation
        self._publishing = publishing
        self._feeds: list[LossFeed] = []

    def subscribe(self, wake: asyncio.Event) -> LossFeed:
        """Return a feed of the losses from now on; `wake` is set at each."""
        feed = LossFeed(wake)
        self._feeds.append(feed)
        return feed

    def record(self, worker_id: str, incarnation: str, kind: LossKind, reason: str) -> None:
        """Record the loss of an incarnation; the first report counts, later ones are ignored."""
        in_flight = self._fleet.lose(worker_id, incarnation)
        if in_flight is None:
            return
        has_left, ids = kind is LossKind.LEFT, about(worker=worker_id, incarnation=incarnation)
        WORKER_LOSSES.labels(kind.name.lower()).inc()
        if has_left:
            logger.info("worker %s is ended: %s", incarnation, reason, extra=ids)
        else:
            logger.warning("worker %s lost: %s: %s", incarnation, kind.value, reason, extra=ids)
        self._fleet.note_reason(worker_id, reason if has_left else f"{kind.value}: {reason}", self._time.wall())
        flights, samples = in_flight
        worker = self._fleet.worker(worker_id)
        sent = tuple(flight for flight in samples if flight.name not in worker.unsent)
        base_model = self._base_model(worker_id)
        group, quarantine = self._registry.group(base_model), self._quarantines[base_model]
        training = tuple(flight for flight in flights if flight.target_id in group.logs)
        group.lose_copies(worker_id)
        suspects = () if has_left else self._suspects(training, sent)
        for adapter_id in {flight.target_id for flight in training if flight in suspects}:
            seqs = [flight.seq for flight in training if flight.target_id == adapter_id]
            group.logs[adapter_id].quarantine(min(seqs), max(seqs))
        if kind is LossKind.SILENT:
            suspects = self._silenced(quarantine, suspects, sent)
        had_turn = not has_left and self._turns[base_model].lose(worker_id)
        has_snapshots = not flights and worker.has_batch
        has_others = has_snapshots or any(flight not in suspects for flight in (*flights, *sent))
        poison = self._decide(quarantine, suspects, sent, had_turn=had_turn, has_others=has_others)
        self._pause(base_model)
        unproven = () if has_left else tuple(self._fleet.live(base_model))
        if unproven:
            quarantine.begin_check()
        probation = ""
        if poison is not None:
            probation = self._put_on_probation(poison)
            if poison in training:
                self._fail_poison(group.logs[poison.target_id], poison, probation)
                group.mark_dirty(group.logs[poison.target_id])
        name, is_blameless = poison.name if poison else "", had_turn or has_left
        for feed in self._feeds:
            feed.put(WorkerLoss(worker_id, samples, name, probation, is_blameless, unproven))

    def checked(self, loss: WorkerLoss) -> None:
        """Record that each unproven worker has replied to a ping that was sent after the loss, or is late or lost."""
        self._quarantines[loss.unproven[0].info.model.name].end_check()

    def settled(self, worker_id: str) -> None:
        """Record that nothing waits for a worker any more: it was lost and is replaced, or it is to be removed."""
        base_model = self._base_model(worker_id)
        self._turns[base_model].settled(worker_id)
        self._quarantines[base_model].note_waiting(frozenset())  # a group may have waited for it: it goes first
        self._pause(base_model)

    def drained(self, worker_id: str) -> None:
        """Record that a worker was drained, or takes work again: fewer, or more, are left than at the last loss."""
        self._pause(self._base_model(worker_id))

    def not_replaced(self, worker_id: str) -> None:
        """Record that a replacement did not start: running co-batched is a risk, but that wait might never end."""
        base_model = self._base_model(worker_id)
        self._turns[base_model].not_replaced(worker_id)
        self._turns[base_model].pause(is_paused=False)
        self._quarantines[base_model].pause(is_paused=False)

    def _pause(self, base_model: str) -> None:
        """Hold back what might take the last worker, while another one is missing."""
        is_missing = self._fleet.has_lost(base_model)
        self._turns[base_model].pause(is_paused=is_missing)
        self._quarantines[base_model].pause(is_paused=is_missing and len(self._fleet.live(base_model)) <= 1)

    def _base_model(self, worker_id: str) -> str:
        return self._fleet.worker(worker_id).info.model.name

    def _suspects(self, training: Sequence[Flight], samples: Sequence[Flight]) -> tuple[Flight, ...]:
        """Return the operations in flight that may have caused the loss: those of tenants on probation, or else all."""
        flights = (*training, *samples)
        return tuple(flight for flight in flights if self._probation.has(flight.tenant_id)) or flights

    def _silenced(
        self, quarantine: Quarantine, flights: Sequence[Flight], samples: Collection[Flight]
    ) -> tuple[Flight, ...]:
        """Return which of these operations are suspected of the silence of their worker."""
        if any(self._probation.has(flight.tenant_id) for flight in flights):
            return tuple(flights)  # they ran in a solo turn, and no other is among them
        adapters = {flight.target_id: flight.tenant_id for flight in flights if flight not in samples}
        suspects = quarantine.record_silence(adapters, [flight.name for flight in flights if flight in samples])
        return tuple(f for f in flights if (f.name if f in samples else f.target_id) in suspects)

    def _decide(
        self,
        quarantine: Quarantine,
        suspects: Sequence[Flight],
        samples: Collection[Flight],
        *,
        had_turn: bool,
        has_others: bool,
    ) -> Flight | None:
        """Quarantine the suspects, unless they run in solo turns anyway; return the poison, if it is found.

        `has_others`: something was in flight beside the suspects, so none of them ran solo.
        """
        by_name = {flight.name: flight for flight in suspects}
        if any(self._probation.has(flight.tenant_id) for flight in suspects):
            [name, *others] = by_name
            found = name if had_turn and not others and quarantine.count_solo_loss(name) else None
        elif suspects:
            tenants = {f.name if f in samples else f.target_id: f.tenant_id for f in suspects}
            found = quarantine.record_loss(tenants, list(by_name), tenants, has_others=has_others)
        else:
            found = None
        return by_name[found] if found is not None else None

    def _put_on_probation(self, poison: Flight) -> str:
        """Record the kill; return the tenant's probation, for its owner."""
        ids = about(operation=poison.name)
        logger.error("%s ended its worker %d times while it ran solo", poison.name, SOLO_LOSSES_MAX, extra=ids)
        self._probation.record_kill(poison.tenant_id, poison.name)
        standing = self._probation.standing(poison.tenant_id)
        if standing is None:
            return ""
        for quarantine in self._quarantines.values():
            quarantine.release_tenant(poison.tenant_id)
        return str(standing)

    def _fail_poison(self, log: AdapterLog, flight: Flight, probation: str) -> None:
        """Fail the operation; if it is a replay, abort its adapter, which cannot be rebuilt."""
        log.release()
        operation = log.operations.get(flight.seq)
        if operation is None or operation.append_id != flight.append_id:
            return  # its append failed while it ran: it was never accepted
        if not operation.is_final:
            log.fail(operation, worker_died(operation, probation))
            return
        error = replay_differs(log, flight.name, "its worker was lost")
        log.abort(service_error(error))
        self._publishing.fail(log.adapter_id, error)


def replay_differs(log: AdapterLog, operation: str, reason: str) -> ServiceError:
    """Return why an adapter cannot be rebuilt: an operation that had succeeded failed when it was replayed."""
    ids = about(operation=operation, adapter=log.adapter_id)
    logger.error("replay of %s failed: %s", operation, reason, extra=ids)
    return ServiceError(
        Code.DATA_LOSS,
        "REPLAY_DIFFERS",
        f"{log.adapter_id} could not be rebuilt: {operation} had succeeded, but failed when run again",
    )


def worker_died(operation: Operation, probation: str) -> ops_pb.OperationError:
    """Return the error of a poison operation: it ended its worker whenever it ran.

    `probation`: that of its tenant, see `WorkerLoss`.
    """
    return ops_pb.OperationError(
        code=Code.INTERNAL,
        reason="WORKER_DIED",
        message=f"{operation.name} ended its worker each time that it ran, the last times solo: it does not fit into "
        "memory, takes far too long, or triggers a fault of the engine; send less at once"
        + (f". On probation: {probation}" if probation else ""),
    )
