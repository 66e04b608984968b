"""The workers of a pool: incarnations with flights and versions held, adapter copies, facts of the base models.

Workers join and leave while a pool runs. A worker that is to leave is drained first: it gets nothing new. Either it is
replaced then, because its host leaves, or it ends. In memory. Does not depend on schedules or storage, nor on what
operations mean: flights are opaque records. Main invariants: an incarnation that was marked lost never becomes live
again, and has nothing in flight; its replacement is a new incarnation of the same worker; a worker is removed only when
nothing is in flight there.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from coordinator.base.time import Signal
from workers.contract.adapted_modules import COPY_PARAM_BYTES, ModuleKind, adapter_params, rank_class
from workers.contract.messages import NOTHING_USED, AdapterSpec, ModelInfo, WorkerInfo, WorkerUse

VERSIONS_MAX = 64
"""Sampler versions that one worker is asked to hold; the least recently used are removed."""
REASON_CHARS_MAX = 500
"""Characters of the reason of a loss that are kept."""


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation that a worker was sent, or a sample that it is to be sent, and whose result has not arrived."""

    name: str
    """The operation's name."""
    target_id: str
    """The adapter or sampler."""
    seq: int
    append_id: int
    """Its append: another operation may get the sequence number if the append fails."""
    tenant_id: str
    version: str = ""
    """The sampler version that it samples from; empty: a training operation, or the base model."""


@dataclass(slots=True, eq=False)
class Incarnation:
    """One incarnation of a worker: its operations in flight, and the sampler versions that it holds."""

    info: WorkerInfo
    is_live: bool = True
    is_draining: bool = False
    """It gets nothing new: its host leaves, or the worker is to end."""
    is_ending: bool = False
    """It is drained, and no incarnation follows."""
    is_late: bool = False
    """It has not replied to a ping for long, and is not lost yet."""
    is_apart: bool = False
    """Its part of a cycle was split off: the cycles of others do not wait for it."""
    training: tuple[Flight, ...] = ()
    """The operations of the present phase, until it has replied."""
    has_batch: bool = False
    """It was sent a batch, perhaps of snapshots alone, and did not reply to it; a lost one never does."""
    samples: dict[str, Flight] = field(default_factory=dict)
    """The samples in flight there, by name."""
    unsent: set[str] = field(default_factory=set)
    """Those of them whose weights are being read: the worker did not get them, so they cannot end it."""
    held_bytes: int = 0
    """Bytes of host memory that its copies and versions take: as it reported last, and what was sent since."""
    use: WorkerUse = NOTHING_USED
    """As it reported last."""
    lacks_room: bool = False
    """Something must leave it, and could not so far."""
    is_outdated: bool = False
    """The last report may contain what the worker has been told to drop since."""
    _versions: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Bytes of the versions held, the least recently used first."""
    _removals: list[str] = field(default_factory=list)
    _has_dropped: bool = False
    """Something was dropped since the present phase began."""

    @property
    def name(self) -> str:
        """The incarnation's name, unique over all epochs."""
        return self.info.incarnation

    @property
    def is_away(self) -> bool:
        """Whether nothing may be sent there before it has reported."""
        return self.is_live and (self.is_late or self.is_apart)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is in flight there."""
        return not self.training and not self.samples

    def begin_phase(self, flights: tuple[Flight, ...]) -> None:
        """Record the operations of a cycle's phase that are sent to the worker, with the removals so far."""
        self.training, self.has_batch = flights, True
        self._has_dropped = False

    def end_phase(self, held_bytes: int, use: WorkerUse = NOTHING_USED) -> None:
        """Record that the worker replied to the phase, what it holds, and what it takes of its machine."""
        self.training, self.has_batch, self.use = (), False, use
        self.held_bytes, self.is_outdated = held_bytes, self._has_dropped

    def has_room(self, num_bytes: int) -> bool:
        """Return whether it may hold as many bytes more; one that holds nothing takes anything."""
        most = self.info.model.host_bytes_max
        return most is None or not self.held_bytes or self.held_bytes + num_bytes <= most

    def sent(self, num_bytes: int) -> None:
        """Record that a copy or version is sent there, or, below 0, that one is dropped there."""
        self.held_bytes = max(0, self.held_bytes + num_bytes)

    def note_room(self, *, is_lacking: bool) -> None:
        """Record whether something must leave the worker that could not so far."""
        self.lacks_room = is_lacking

    def begin_sample(self, flight: Flight) -> None:
        """Record that a sample has slots of the worker; it is sent there when its weights are read."""
        self.samples[flight.name] = flight
        self.unsent.add(flight.name)

    def send_sample(self, name: str) -> None:
        """Record that a sample is sent to the worker now."""
        self.unsent.discard(name)

    def end_sample(self, name: str) -> bool:
        """Record that the worker no longer has this sample; return whether it had it."""
        self.unsent.discard(name)
        return self.samples.pop(name, None) is not None

    def drain(self, *, is_ending: bool) -> None:
        """Get nothing new from now on. `is_ending`: no incarnation follows."""
        self.is_draining, self.is_ending = True, self.is_ending or is_ending

    def undrain(self) -> None:
        """Get work again."""
        self.is_draining = self.is_ending = False

    def be_late(self, *, is_late: bool) -> None:
        """Record that a ping is overdue, or was replied to."""
        self.is_late = is_late

    def set_apart(self, *, is_apart: bool) -> None:
        """Record that its part of a cycle was split off, or that this part has ended."""
        self.is_apart = is_apart

    def end(self) -> tuple[tuple[Flight, ...], tuple[Flight, ...]]:
        """Mark the incarnation lost; return the training operations and samples that were in flight."""
        self.is_live, self.held_bytes = False, 0
        training, samples = self.training, tuple(self.samples.values())
        self.training, self.samples = (), {}
        return training, samples

    @property
    def versions(self) -> tuple[str, ...]:
        """The sampler versions that the worker holds, the least recently used first."""
        return tuple(self._versions)

    def holds(self, version: str) -> bool:
        """Return whether this record has the sampler version as held; the worker may have dropped it."""
        return version in self._versions

    def uses(self, version: str) -> bool:
        """Return whether a sample in flight there samples from this version."""
        return any(flight.version == version for flight in self.samples.values())

    def hold(self, version: str, num_bytes: int = 0) -> None:
        """Record that the worker holds this version, or is being sent it; remove the least recently used ones.

        `num_bytes`: of its weights; 0: as it is known already.
        """
        self._versions[version] = num_bytes or self._versions.get(version, 0)
        self._versions.move_to_end(version)
        if version in self._removals:
            self._removals.remove(version)
        in_use = {flight.version for flight in self.samples.values()}
        for old in [v for v in self._versions if v not in in_use and v != version]:
            if len(self._versions) <= VERSIONS_MAX:
                break
            del self._versions[old]
            self._removals.append(old)

    def drop_version(self, version: str) -> int:
        """Have the worker drop a sampler version with its next message; return its bytes, as far as they are known."""
        num_bytes = self._versions.pop(version, 0)
        self.drop(version)
        self.sent(-num_bytes)
        return num_bytes

    def keep(self, adapter_id: str) -> None:
        """Drop a copy no more: another one is installed there."""
        if adapter_id in self._removals:
            self._removals.remove(adapter_id)

    def misses(self, version: str) -> None:
        """Record that the worker does not hold this version, as it reported."""
        self._versions.pop(version, None)

    def drop(self, key: str) -> None:
        """Have the worker drop an adapter or version with its next batch or sample."""
        if key not in self._removals:
            self._removals.append(key)
        self._has_dropped = self.is_outdated = True

    def take_removals(self) -> tuple[str, ...]:
        """Return the adapters and versions that the worker must drop with the message that is sent now."""
        removals, self._removals = tuple(self._removals), []
        return removals


@dataclass(frozen=True, slots=True)
class Losses:
    """How often a worker was lost since the coordinator started, and why last. For people."""

    num: int = 0
    last_at: float = 0.0
    """Seconds since 1970."""
    reason: str = ""
    """At most `REASON_CHARS_MAX` characters, on one line."""
    start_problem: str = ""
    """Why its next incarnation did not start at the last attempt, likewise; empty if it has started."""


class Residency:
    """Which adapters have a copy whose home is which worker: adapters by worker, the least recently used first."""

    def __init__(self) -> None:
        self._by_worker: dict[str, dict[str, None]] = {}
        self._left: dict[str, dict[str, None]] = {}
        """Adapters whose copies on a worker do not count any more: they are still there."""

    def enter(self, worker_id: str, adapter_id: str) -> None:
        """Record that the adapter has a copy there, or that its copy was used."""
        on_worker = self._by_worker.setdefault(worker_id, {})
        on_worker.pop(adapter_id, None)
        on_worker[adapter_id] = None
        self._left.get(worker_id, {}).pop(adapter_id, None)

    def leave(self, worker_id: str, adapter_id: str) -> None:
        """Record that the adapter's copy there does not count any more."""
        self._by_worker.get(worker_id, {}).pop(adapter_id, None)
        self._left.setdefault(worker_id, {})[adapter_id] = None

    def take_left(self, worker_id: str) -> list[str]:
        """Return the adapters that left this worker since the last call and have no other copy there."""
        return list(self._left.pop(worker_id, ()))

    def on(self, worker_id: str) -> list[str]:
        """Return the adapters with a copy on this worker."""
        return list(self._by_worker.get(worker_id, ()))

    def evicted(self, worker_id: str, num_slots: int) -> Collection[str]:
        """Return the adapters of this worker that are not in one of its slots, as far as the order of use tells."""
        on_worker = self._by_worker.get(worker_id, {})
        return set(itertools.islice(on_worker, max(0, len(on_worker) - num_slots)))

    def counts(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """Return the number of adapters with a copy on each of these workers."""
        return {worker_id: len(self._by_worker.get(worker_id, ())) for worker_id in worker_ids}


class Fleet:
    """The workers of all base models."""

    def __init__(self) -> None:
        self.changed = Signal()
        """Other workers take work or are expected than before, or something may leave one that lacks room."""
        self.away: frozenset[str] = frozenset()
        """The live workers that are late, or whose part of a cycle was split off: their adapters wait for them."""
        self.leaving: frozenset[str] = frozenset()
        """The workers that are drained: nothing runs there any more."""
        self.expected: set[str] = set()
        """The workers that are there or are to come; not those that end."""
        self.models: dict[str, ModelInfo] = {}
        """Base model to its facts: the memory of the worker with the least to train, of the one with the most to
        sample."""
        self._workers: dict[str, Incarnation] = {}
        self._num_losses: Counter[str] = Counter()
        """By worker, since its last reply to a batch."""
        self._losses: dict[str, Losses] = {}
        self._copy_bytes: dict[tuple[str, int, tuple[ModuleKind, ...]], int] = {}

    def add(self, info: WorkerInfo) -> None:
        """Take in a worker, or the next incarnation of a lost one; it holds no adapter and no version."""
        assert not self.is_live(info.worker_id)
        self._workers[info.worker_id] = Incarnation(info)
        self.expect([info.worker_id])
        self._losses[info.worker_id] = replace(self.losses(info.worker_id), start_problem="")
        self.models.setdefault(info.model.name, info.model)
        self._note_memory()
        self._note_away()
        self.changed.notify()

    def expect(self, worker_ids: Iterable[str]) -> None:
        """Record that these workers are to come."""
        self.expected.update(worker_ids)

    def dismiss(self, worker_id: str) -> None:
        """Record that a worker ends, or is not to come any more."""
        self.expected.discard(worker_id)
        self.changed.notify()

    def drain(self, worker_id: str, *, is_ending: bool) -> None:
        """Give a worker nothing new. `is_ending`: it is not replaced."""
        self._workers[worker_id].drain(is_ending=is_ending)
        self._note_away()

    def undrain(self, worker_id: str) -> None:
        """Let a drained worker that has not ended take work again."""
        self._workers[worker_id].undrain()
        self._note_away()

    def remove(self, worker_id: str) -> None:
        """Remove a drained worker that has nothing in flight. The facts of its base model stay."""
        worker = self._workers.pop(worker_id)
        assert worker.is_ending
        assert worker.is_clear
        worker.end()
        self._num_losses.pop(worker_id, None)
        self._losses.pop(worker_id, None)
        self._note_memory()
        self._note_away()

    def worker_ids(self) -> list[str]:
        """Return every worker, live or not."""
        return list(self._workers)

    def worker(self, worker_id: str) -> Incarnation:
        """Return the present incarnation of a worker, live or not."""
        return self._workers[worker_id]

    def find(self, worker_id: str) -> Incarnation | None:
        """Return the present incarnation of a worker if it is live."""
        found = self._workers.get(worker_id)
        return found if found is not None and found.is_live else None

    def is_live(self, worker_id: str) -> bool:
        """Return whether the worker's present incarnation is live."""
        return self.find(worker_id) is not None

    def available(self, base_model: str) -> list[Incarnation]:
        """Return the workers of a base model that take work: live, not drained, and not away."""
        return [w for w in self.live(base_model) if not w.is_away]

    def live(self, base_model: str) -> list[Incarnation]:
        """Return the workers of a base model that are live and not drained; they may be away."""
        return [w for w in self._of(base_model) if w.is_live and not w.is_draining]

    def staying(self, base_model: str) -> list[Incarnation]:
        """Return the workers of a base model that take work now or will again: all but those that end."""
        return [w for w in self._of(base_model) if not w.is_ending]

    def drained(self, base_model: str) -> list[Incarnation]:
        """Return the workers of a base model that are drained, live or not."""
        return [w for w in self._of(base_model) if w.is_draining]

    def has_lost(self, base_model: str) -> bool:
        """Return whether a worker of this base model is lost and to be replaced."""
        return any(not w.is_live and not w.is_ending for w in self._of(base_model))

    def lose(self, worker_id: str, incarnation: str) -> tuple[tuple[Flight, ...], tuple[Flight, ...]] | None:
        """Mark an incarnation lost; return its training operations and samples in flight.

        None if that incarnation was lost or removed before.
        """
        found = self.find(worker_id)
        if found is None or found.name != incarnation:
            return None
        in_flight = found.end()
        self._note_away()
        return in_flight

    def be_late(self, worker: Incarnation, *, is_late: bool) -> None:
        """Record that a ping of the worker is overdue, or was replied to."""
        if worker.is_late != is_late:
            worker.be_late(is_late=is_late)
            self._note_away()

    def set_apart(self, worker: Incarnation, *, is_apart: bool) -> None:
        """Record that the worker's part of a cycle was split off, or that this part has ended."""
        worker.set_apart(is_apart=is_apart)
        self._note_away()

    def note_loss(self, worker_id: str) -> int:
        """Count a loss of the worker; return the number of losses since its last reply to a batch."""
        self._num_losses[worker_id] += 1
        return self._num_losses[worker_id]

    def answered(self, worker_id: str) -> None:
        """Reset the count of losses: the worker replied to a batch."""
        self._num_losses.pop(worker_id, None)

    def losses(self, worker_id: str) -> Losses:
        """Return the losses of a worker."""
        return self._losses.get(worker_id, Losses())

    def note_reason(self, worker_id: str, reason: str, at: float) -> None:
        """Record when and why an incarnation of the worker was lost."""
        before = self.losses(worker_id)
        self._losses[worker_id] = replace(before, num=before.num + 1, last_at=at, reason=_for_people(reason))

    def note_start_problem(self, worker_id: str, reason: str) -> None:
        """Record why the worker's next incarnation did not start."""
        self._losses[worker_id] = replace(self.losses(worker_id), start_problem=_for_people(reason))

    def hold_version(self, worker_id: str, incarnation: str, version: str, num_bytes: int = 0) -> None:
        """Record that an incarnation of the worker holds a sampler version; ignored if that incarnation is lost."""
        if (found := self.find(worker_id)) is not None and found.name == incarnation:
            found.hold(version, num_bytes)

    def drop_version(self, worker_id: str, version: str) -> None:
        """See `Incarnation.drop_version`; ignored if the worker is lost."""
        if (found := self.find(worker_id)) is not None:
            found.drop_version(version)

    def drop_copy(self, worker_id: str, spec: AdapterSpec) -> None:
        """Have a worker drop a copy of an adapter with its next message; ignored if the worker is lost."""
        if (found := self.find(worker_id)) is not None:
            found.drop(spec.adapter_id)
            found.sent(-self.copy_bytes(found.info.model.name, spec))

    def copy_bytes(self, base_model: str, spec: AdapterSpec) -> int:
        """Return the host memory of a copy: weights, moments and gradient, of the rank that a worker pads."""
        key = base_model, rank_class(spec.rank), spec.kinds
        if key not in self._copy_bytes:
            params = adapter_params(self.models[base_model].modules, *spec.kinds)
            self._copy_bytes[key] = COPY_PARAM_BYTES * rank_class(spec.rank) * params
        return self._copy_bytes[key]

    def copy_bytes_max(self, base_model: str) -> int | None:
        """Return the most bytes that a copy may have on any worker of a base model; None: any number.

        In the worker's host memory, and in the bank on its GPU.
        """
        models = [each.info.model for each in self._of(base_model)]
        limits = [(each.host_bytes_max, each.bank_bytes_max) for each in models]
        offered = [min((each for each in pair if each is not None), default=None) for pair in limits]
        return None if None in offered else max((each for each in offered if each is not None), default=None)

    def _note_away(self) -> None:
        away = frozenset(worker_id for worker_id, each in self._workers.items() if each.is_away)
        leaving = frozenset(worker_id for worker_id, each in self._workers.items() if each.is_draining)
        if (away, leaving) != (self.away, self.leaving):
            self.away, self.leaving = away, leaving
            self.changed.notify()

    def _of(self, base_model: str) -> list[Incarnation]:
        return [worker for worker in self._workers.values() if worker.info.model.name == base_model]

    def _note_memory(self) -> None:
        """Update the memory facts of every base model that has workers.

        The worker with the least memory limits training, because an adapter may be placed on any worker. The one with
        the most limits sampling, because a large sample can be placed there.
        """
        for name, model in self.models.items():
            if not (found := [each.info.model for each in self._of(name)]):
                continue
            fitting = [each.fitting_tokens for each in found if each.fitting_tokens is not None]
            blocks = [each.num_cache_blocks for each in found if each.num_cache_blocks is not None]
            self.models[name] = replace(
                model,
                fitting_tokens=min(fitting, default=None),
                num_cache_blocks=max(blocks, default=None) if len(blocks) == len(found) else None,
            )


def _for_people(reason: str) -> str:
    """Return a reason on one line, cut to `REASON_CHARS_MAX` characters."""
    line = " ".join(reason.split())
    return line if len(line) <= REASON_CHARS_MAX else f"{line[: REASON_CHARS_MAX - 4]} ..."
