"""The adapters of one base model that have something to run, and which of them may be in the next cycle.

What an adapter runs next is decided in its log. Quarantine, solo turns, files that are being written or cannot be read
now, the suspension of its tenant and full workers hold an adapter back. Does not depend on tenants' counters, budgets
or how a plan is run.

Main invariant: an idle adapter adds no cost to a cycle, because it is in no collection that is walked through here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.observe.timeline import Reason
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.copy import Ahead
from coordinator.operations.operation import Kind
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.adapter_costs import Costs
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.state_budget import StateCandidate, StateCost, StateCosts
from coordinator.scheduling.worker_memory import WorkerMemory
from tinkerpool.v1 import history_pb2


class Candidate(NamedTuple):
    """An adapter that may have something to run in a pass."""

    adapter_id: str
    tenant_id: str
    home: str
    """The worker of its copy; empty: it may be placed on any worker."""
    chunks: Callable[[], Iterator[int]]
    """Yields the tokens of its ready chunks, in the order in which they must run; each call yields the same."""
    last_cycle_id: int
    """The cycle that last had it; 0: none."""
    item: float = 0.0
    """What each chunk costs besides its tokens, in tokens."""
    move: float = 0.0
    """What its way into a slot costs, in tokens; 0: it is in one."""


class ReadySet:
    """The adapters of one base model that could be in the next cycle."""

    def __init__(
        self,
        group: AdapterGroup,
        quarantine: Quarantine,
        turns: SoloTurns,
        memory: WorkerMemory,
        snapshots: Snapshots,
        publishing: Publishing,
        costs: Costs,
        is_held: Callable[[str], bool],
    ) -> None:
        """`is_held` returns whether a tenant is suspended: queued operations and replays wait, what has begun ends."""
        self._group = group
        self._is_held = is_held
        self._quarantine = quarantine
        self._turns = turns
        self._memory = memory
        self._snapshots = snapshots
        self._publishing = publishing
        self.costs = costs
        self._is_stopping = False
        self._held_back: Collection[str] = frozenset()
        self._past_snapshots: dict[str, AdapterLog] = {}
        """Adapters whose copies may be past their snapshots."""
        self._last_cycle: dict[str, int] = {}
        self._last_states: dict[str, int] = {}
        """Adapter to the cycle in whose step phase it last had a turn."""

    def stop(self) -> None:
        """Stop beginning operations; those that have run in part may continue."""
        self._is_stopping = True

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self.costs.forget(adapter_id)
        self._memory.forget(adapter_id)
        self._past_snapshots.pop(adapter_id, None)
        self._last_cycle.pop(adapter_id, None)
        self._last_states.pop(adapter_id, None)

    def ran(self, adapter_ids: Iterable[str]) -> None:
        """Record that workers returned results for these adapters."""
        logs = self._group.logs
        for log in [logs[name] for name in adapter_ids if name in logs]:
            self._past_snapshots[log.adapter_id] = log
            if log.home:
                self._group.residency.enter(log.home, log.adapter_id)

    def planned(self, adapter_id: str, cycle_id: int) -> None:
        """Record that the adapter is in the pass of this cycle."""
        self._last_cycle[adapter_id] = cycle_id

    def planned_states(self, adapter_ids: Iterable[str], cycle_id: int) -> None:
        """Record that the adapters have a turn in the step phase of this cycle."""
        self._last_states.update(dict.fromkeys(adapter_ids, cycle_id))

    def refresh(self) -> bool:
        """Prepare the next cycle; return whether any adapter may run, or has decided operations to commit.

        Drops idle adapters, releases quarantined ones that survived, and lets a solo turn begin.
        """
        self._group.mark_clean([name for name, log in self._group.dirty.items() if not log.is_ready()])
        self._note_waiting()
        self._release_survivors()
        self._turns.update(self._can_run, self._held_back)
        return any(True for _ in self.allowed()) or any(log.has_decided for log in self.dirty())

    def dirty(self) -> list[AdapterLog]:
        """Return all adapters that changed, whether or not they may run, but none that waits for a late worker.

        What is decided behind operations that are in flight there is committed after them.
        """
        away, held, logs = self._memory.away, self._held_back, self._group.dirty.values()
        if not away and not held:
            return list(logs)
        return [log for log in logs if log.home not in away and log.adapter_id not in held]

    def hold_back(self, adapter_ids: Collection[str]) -> None:
        """Hold adapters back, and no others, until the part of a cycle that has them has ended.

        If its worker is lost, what it decided before must be committed before anything behind it.
        """
        self._held_back = adapter_ids
        self._note_waiting()

    def allowed(self) -> Iterator[AdapterLog]:
        """Yield the ready adapters that may run; during a stop, only adapters in the middle of an operation."""
        are_turns_idle, leaving, targets = self._turns.are_idle, self._memory.leaving, self._memory.targets
        for log in self.dirty():
            if log.home in leaving or (log.adapter_id in targets and self._memory.is_moving(log)):
                continue  # its copy is about to leave
            if not (self._quarantine.may_run(log.adapter_id) if are_turns_idle else self._turn_wait(log) is None):
                continue
            if self._wait(log) is None:
                yield log

    def waiting(self) -> Iterator[tuple[AdapterLog, Reason]]:
        """Yield the adapters with something to run that may not run now, each with what it waits for."""
        away, held, moving = self._memory.away, self._held_back, self._memory.leaving
        for log in self._group.dirty.values():
            if log.home in away or log.adapter_id in held:
                yield log, history_pb2.WAIT_REASON_WORKER
            elif log.home in moving or (log.adapter_id in self._memory.targets and self._memory.is_moving(log)):
                yield log, history_pb2.WAIT_REASON_MOVE
            else:
                reason = self._turn_wait(log)
                reason = self._wait(log) if reason is None else reason
                if reason is not None:
                    yield log, reason

    def _turn_wait(self, log: AdapterLog) -> Reason | None:
        """Return whether the adapter waits for the quarantine or for a solo turn; None: it does not."""
        if not self._turns.are_idle and self._turns.is_held(log):
            has_turn = self._turns.has_turn(log.adapter_id) and self._turns.reserved not in self._memory.away
            return None if has_turn else history_pb2.WAIT_REASON_PROBATION
        if not self._quarantine.may_run(log.adapter_id):
            return history_pb2.WAIT_REASON_QUARANTINE
        leaves_room = self._turns.are_idle or self._turns.leaves_room(log)
        return None if leaves_room else history_pb2.WAIT_REASON_QUARANTINE

    def ahead(self, log: AdapterLog) -> Ahead:
        """Return what a worker may run next; see `_may_begin`."""
        return log.ahead(may_begin=self._may_begin(log))

    def _may_begin(self, log: AdapterLog) -> bool:
        """Return whether operations may begin: not in a stop or a suspension, nor before a doubtful append ends."""
        return not self._is_stopping and not self._is_held(log.tenant_id) and not log.waits_for_append

    def _can_run(self, log: AdapterLog) -> bool:
        return self._wait(log) is None

    def _wait(self, log: AdapterLog) -> Reason | None:
        """Return what the adapter waits for, other than a turn; None: nothing."""
        may_begin = self._may_begin(log)
        if not self._snapshots.may_read(log.adapter_id) or self.waits_for_file(log, may_begin=may_begin):
            return history_pb2.WAIT_REASON_FILE
        if not (may_begin or self._must_go_on(log)):
            return history_pb2.WAIT_REASON_CYCLE if log.waits_for_append else history_pb2.WAIT_REASON_HELD
        # Last, because room is made for an adapter that finds none.
        return None if log.copy.home or self._has_room(log) else history_pb2.WAIT_REASON_MEMORY

    def _must_go_on(self, log: AdapterLog) -> bool:
        """Return whether the adapter has something to run although no operation may begin."""
        ahead = log.ahead(may_begin=False)
        if not ahead.is_replaying:
            return next(ahead.passes(), None) is not None
        return not self._memory.has_suspended_replay(log)

    def _has_room(self, log: AdapterLog) -> bool:
        """Return whether a worker of its class has room for a copy of the adapter. A solo turn has room in any case."""
        if not self._memory.crowded(log):
            return True
        if self._turns.is_held(log):
            return bool(set(self._memory.worker_ids()) - self._memory.others(log))
        workers = self._turns.workers_for(log, self.residents(self._memory.worker_ids()))
        return not self._memory.must_wait(log, workers)

    def end_cycle(self) -> None:
        """End the solo turn of an adapter that was in the cycle."""
        for adapter_id in self._turns.end_cycle():
            self._quarantine.release(adapter_id)

    def tenants(self) -> frozenset[str]:
        """Return the tenants of the adapters that may run."""
        return frozenset(log.tenant_id for log in self.allowed())

    def has_tokens(self, num_tokens: int) -> bool:
        """Return whether the ready chunks cost at least this many tokens."""
        left = float(num_tokens)
        for log in self.allowed():
            item = self.costs.of(log.spec).item
            for chunk_tokens in self.ahead(log).chunks():
                left -= chunk_tokens + item
                if left <= 0:
                    return True
        return False

    def candidates(self, slots: Mapping[str, int]) -> list[Candidate]:
        """Return the adapters that may have ready chunks; `slots`: those of each worker."""
        evicted = self._evicted(slots)
        return [self._candidate(log, evicted) for log in self.allowed()]

    def _candidate(self, log: AdapterLog, evicted: Collection[str]) -> Candidate:
        adapter_id, home, cost = log.adapter_id, log.copy.home, self.costs.of(log.spec)
        return Candidate(
            adapter_id,
            log.tenant_id,
            home or (self._turns.reserved if self._turns.has_turn(adapter_id) else ""),
            log.ahead(may_begin=self._may_begin(log)).chunks,
            self._last_cycle.get(adapter_id, 0),
            cost.item,
            0.0 if home and adapter_id not in evicted else cost.move,
        )

    def _evicted(self, slots: Mapping[str, int]) -> Collection[str]:
        """Return the adapters with a copy that is not in a slot of its worker."""
        residency = self._group.residency
        return set[str]().union(*(residency.evicted(worker_id, number) for worker_id, number in slots.items()))

    def crowded(self, candidates: Iterable[Candidate]) -> dict[str, frozenset[str]]:
        """Return the workers without room for each of the candidates that have no copy."""
        logs = [self._group.logs[each.adapter_id] for each in candidates if not each.home]
        return {log.adapter_id: crowded for log in logs if (crowded := self._memory.crowded(log))}

    def due_steps(self) -> Iterator[tuple[AdapterLog, Ahead]]:
        """Yield the adapters with operations for the step phase; each is examined when it is yielded.

        Whether operations may begin is asked once: a stop or a suspension does not change a phase that is being built.
        """
        for log, may_begin in [(log, self._may_begin(log)) for log in self.allowed()]:
            ahead = log.ahead(may_begin=may_begin)
            if next(ahead.states(), None) is not None:
                yield log, ahead

    def are_few_steps(self, due: Iterable[tuple[AdapterLog, bool]], tokens_max: float) -> bool:
        """Return whether these are optimizer steps alone, and cost at most as many tokens, each with a move."""
        left = tokens_max
        for log, may_begin in due:
            # There is at most one optim_step, so a save or a load is among the first two operations.
            if any(each.kind.moves_state for each in itertools.islice(log.ahead(may_begin=may_begin).states(), 2)):
                return False
            cost = self.costs.of(log.spec)
            left -= cost.step + cost.move
        return left >= 0

    def state_candidates(
        self, due: Iterable[tuple[AdapterLog, bool]], slots: Mapping[str, int], costs: StateCosts, tokens_per_s: float
    ) -> Iterator[StateCandidate]:
        """Yield adapters with their operations that the step phase may run now.

        `due`: each with whether its operations may begin. `slots`: those of each worker.
        """
        evicted = self._evicted(slots)
        for log, may_begin in due:
            adapter_id, cost = log.adapter_id, self.costs.of(log.spec)
            step_s = (cost.step + (cost.move if adapter_id in evicted else 0.0)) / tokens_per_s
            each = self._costs_of_states(log, StateCost(0, step_s, moves_state=False), costs, may_begin=may_begin)
            yield StateCandidate(adapter_id, log.tenant_id, each, self._last_states.get(adapter_id, 0))

    def _costs_of_states(
        self, log: AdapterLog, step: StateCost, costs: StateCosts, *, may_begin: bool
    ) -> Iterator[StateCost]:
        for operation in log.ahead(may_begin=may_begin).states():
            yield costs.of(operation.kind, log.spec) if operation.kind.moves_state else step

    def residents(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """Return how many adapters have a copy on each of these workers."""
        return self._group.residency.counts(worker_ids)

    def loads(self, tokens: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Return the sum of these adapters' tokens by the workers that they are on."""
        loads: defaultdict[str, float] = defaultdict(float)
        for adapter_id, number in tokens:
            if (log := self._group.logs.get(adapter_id)) is not None:
                loads[log.home] += number
        return loads

    def past_snapshots(self) -> list[AdapterLog]:
        """Return the adapters whose copies ran operations that their snapshots do not contain.

        Except quarantined ones, and those whose worker is away.

        If their worker were lost during a snapshot, the quarantine would blame the operations and not the snapshot.
        """
        for name in [name for name, log in self._past_snapshots.items() if not log.is_past_snapshot]:
            del self._past_snapshots[name]
        away, past = self._memory.away, self._past_snapshots.items()
        return [log for name, log in past if self._quarantine.may_run(name) and log.home not in away]

    def waits_for_file(self, log: AdapterLog, *, may_begin: bool) -> bool:
        """Return whether the adapter must wait for the writing of its snapshot or of its published weights.

        A copy is installed from the newest snapshot; a load brings a snapshot of its own and so cuts the log.
        """
        is_unsettled = self._snapshots.is_unsettled(log.adapter_id)
        if not is_unsettled and not self._publishing.is_unwritten(log.adapter_id):
            return False
        states = list(log.ahead(may_begin=may_begin).states())
        is_loading = bool(states) and states[-1].kind is Kind.LOAD_STATE
        return is_loading or (is_unsettled and not log.home)

    def _note_waiting(self) -> None:
        """Tell the quarantine which of its adapters cannot run now."""
        held, dirty = self._held_back, self._group.dirty
        self._quarantine.note_waiting(
            {name for name in self._quarantine.names if name in held or (name in dirty and self._is_stuck(dirty[name]))}
        )

    def _is_stuck(self, log: AdapterLog) -> bool:
        """Return whether the adapter waits for a file, or for a worker that is late or missing.

        Not whether it waits for room: the copies of others leave for a quarantined adapter while it holds them back.
        """
        if not self._snapshots.may_read(log.adapter_id) or self.waits_for_file(log, may_begin=self._may_begin(log)):
            return True
        if log.home:
            return log.home in self._memory.away
        return self._memory.others(log).issuperset(self._memory.worker_ids())

    def _release_survivors(self) -> None:
        """Release quarantined adapters that ran their quarantined operations, are idle, or may begin nothing."""
        while survivors := [log for name in self._quarantine.group if (log := self._survivor(name)) is not None]:
            for log in survivors:
                log.release()
                self._quarantine.release(log.adapter_id)

    def _survivor(self, name: str) -> AdapterLog | None:
        log = self._group.logs.get(name)
        if log is None:
            return None  # a sample
        has_run = log.copy.cursor >= log.quarantined[1]
        # One that may begin nothing does not run, and the others of its group would wait for it.
        is_idle = name not in self._group.dirty or self._is_held(log.tenant_id) or log.waits_for_append
        return log if has_run or is_idle else None
