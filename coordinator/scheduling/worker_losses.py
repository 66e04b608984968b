"""The loss of a worker: its atomic record, and the quarantine of the operations that may have caused it.

`LossRecorder` takes these steps without an await in between: mark the incarnation lost and collect the operations in
flight there (training and samples together); drop every adapter copy there; decide the quarantine; fail a poison
training operation; then publish one event. Receivers read their events before their next dispatch. `Quarantine` holds
everything that was in flight on lost workers: it decides which adapters and samples may run until the poison is found.

Depends on the fleet and adapter logs; not on how a loss was noticed, or on how the worker is replaced. Main invariants:
an incarnation is recorded as lost at most once; no name is in two quarantined groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.base.errors import Code, ServiceError
from coordinator.base.time import Signal
from coordinator.checkpoints.published_weights import Publishing
from coordinator.fleet.fleet import Fleet, Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Operation, service_error
from coordinator.operations.registry import AdapterRegistry
from tinkerpool.v1 import operations_pb2 as ops_pb

logger = logging.getLogger(__name__)

SOLO_LOSSES_MAX = 2
"""Solo losses of an operation after which it is the poison."""


class Quarantine:
    """The quarantined adapters and samples of one base model; a sample goes by its operation's name. Pure; names only.

    Quarantined groups run by bisection: one half at a time, without any other adapter or sample, and only while every
    worker is live, so that a half runs on a worker that holds nothing else. A half whose worker is lost again is halved
    again; one that survives is released. An operation is the poison only if it ran solo and its worker was lost, twice.
    So a worker that is lost for another reason costs time, and fails no operation, unless it is lost during the same
    operation's solo run twice.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        """Another set of adapters and samples may run than before."""
        self._groups: deque[set[str]] = deque()
        """The first one may run. No name is in two."""
        self._solo_losses: Counter[str] = Counter()
        """Solo losses by operation."""
        self._is_paused = False

    def pause(self, *, is_paused: bool) -> None:
        """Hold quarantined groups back while a worker is missing, and run all others meanwhile; or end that pause."""
        self._is_paused = is_paused
        self.changed.notify()

    @property
    def group(self) -> frozenset[str]:
        """The group that may run; empty: nothing is quarantined."""
        return frozenset(self._groups[0]) if self._groups else frozenset()

    def may_run(self, name: str) -> bool:
        """Return whether this adapter or sample may run now."""
        if self._is_paused:
            return not any(name in group for group in self._groups)
        return not self._groups or name in self._groups[0]

    def num_solo_losses(self, operation: str) -> int:
        """Return how often this operation ran solo and its worker was lost."""
        return self._solo_losses[operation]

    def record_loss(self, names: Collection[str], operations: Collection[str]) -> str | None:
        """Record the loss of a worker that had these adapters and samples in flight, running these operations.

        Returns the operation that is the poison, if that is decided by this loss.
        """
        lost = sorted(names)
        was_solo = len(lost) == 1 and self.group == set(lost)
        for name in lost:
            self._take_out(name)
        if not was_solo:
            middle = (len(lost) + 1) // 2
            self._groups.extendleft(half for half in (set(lost[middle:]), set(lost[:middle])) if half)
            return None
        if len(operations) == 1:
            [operation] = operations
            self._solo_losses[operation] += 1
            if self._solo_losses[operation] >= SOLO_LOSSES_MAX:
                del self._solo_losses[operation]
                self.changed.notify()
                return operation
        self._groups.appendleft(set(lost))
        return None

    def release(self, name: str) -> None:
        """Release an adapter or sample that ran and whose worker survived, or that was deleted or has finished."""
        before = self.group
        self._take_out(name)
        for operation in [o for o in self._solo_losses if o == name or o.rpartition(":")[0] == name]:
            del self._solo_losses[operation]
        if self.group != before:
            self.changed.notify()

    def _take_out(self, name: str) -> None:
        for group in self._groups:
            group.discard(name)
        self._groups = deque(group for group in self._groups if group)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """An incarnation of a worker is lost."""

    worker_id: str
    incarnation: str
    samples: tuple[Flight, ...]
    """Samples that were in flight there."""
    poison: str
    """The operation that is the poison; empty: not decided by this loss."""


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
        self, fleet: Fleet, registry: AdapterRegistry, quarantines: Mapping[str, Quarantine], publishing: Publishing
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._quarantines = quarantines
        self._publishing = publishing
        self._feeds: list[LossFeed] = []

    def subscribe(self, wake: asyncio.Event) -> LossFeed:
        """Return a feed of the losses from now on; `wake` is set at each."""
        feed = LossFeed(wake)
        self._feeds.append(feed)
        return feed

    def record(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Record the loss of an incarnation; the first report counts, later ones are ignored."""
        in_flight = self._fleet.lose(worker_id, incarnation)
        if in_flight is None:
            return
        logger.warning("worker %s lost: %s", incarnation, reason)
        training, samples = in_flight
        base_model = self._fleet.worker(worker_id).info.model.name
        group, quarantine = self._registry.group(base_model), self._quarantines[base_model]
        training = tuple(flight for flight in training if flight.target_id in group.logs)
        for adapter_id in group.residency.on(worker_id):
            log = group.logs[adapter_id]
            log.lose_copy()
            group.mark_dirty(log)
        for adapter_id in {flight.target_id for flight in training}:
            seqs = [flight.seq for flight in training if flight.target_id == adapter_id]
            group.logs[adapter_id].quarantine(min(seqs), max(seqs))
        poison = self._quarantined(quarantine, training, samples)
        quarantine.pause(is_paused=True)
        for flight in training:
            if flight.name == poison:
                self._fail_poison(group.logs[flight.target_id], flight)
                group.mark_dirty(group.logs[flight.target_id])
        group.changed.notify()
        for feed in self._feeds:
            feed.put(WorkerLoss(worker_id, incarnation, samples, poison))

    @staticmethod
    def _quarantined(quarantine: Quarantine, training: Sequence[Flight], samples: Sequence[Flight]) -> str:
        names = {flight.target_id for flight in training}.union(flight.name for flight in samples)
        operations = list(dict.fromkeys(flight.name for flight in (*training, *samples)))
        return (quarantine.record_loss(names, operations) if names else None) or ""

    def _fail_poison(self, log: AdapterLog, flight: Flight) -> None:
        """Fail the operation; if it is a replay, abort its adapter, which cannot be rebuilt."""
        logger.error("%s ended its worker %d times while it ran solo", flight.name, SOLO_LOSSES_MAX)
        log.release()
        operation = log.operations.get(flight.seq)
        if operation is None or operation.append_id != flight.append_id:
            return  # its append failed while it ran: it was never accepted
        if not operation.is_final:
            log.fail(operation, worker_died(operation))
            return
        error = replay_differs(log, flight.name, "its worker was lost")
        log.abort(service_error(error))
        self._publishing.fail(log.adapter_id, error)


def replay_differs(log: AdapterLog, operation: str, reason: str) -> ServiceError:
    """Return why an adapter cannot be rebuilt: an operation that had succeeded failed when it was replayed."""
    logger.error("replay of %s failed: %s", operation, reason)
    return ServiceError(
        Code.DATA_LOSS,
        "REPLAY_DIFFERS",
        f"{log.adapter_id} could not be rebuilt: {operation} had succeeded, but failed when run again",
    )


def worker_died(operation: Operation) -> ops_pb.OperationError:
    """Return the error of a poison operation: it ended its worker whenever it ran."""
    return ops_pb.OperationError(
        code=Code.INTERNAL,
        reason="WORKER_DIED",
        message=f"{operation.name} ended its worker each time that it ran, the last times solo: it does not fit into "
        "memory, takes far too long, or triggers a fault of the engine; send less at once",
    )
