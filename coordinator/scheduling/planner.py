"""Plans the passes of one base model: which adapters may run, which share the next pass, and on which worker each runs.

`ReadySet` has the adapters that have something to run; what an adapter runs next is decided in its log. `plan_pass` is
a pure function of the ready chunks, the tenants' virtual counters and the token budget: the next chunk is one of the
tenant with the lowest counter, and within a tenant adapters are served round robin. `Planning` owns the state of
planning between cycles. Does not depend on a clock, the database, or how a plan is run.

Main invariants: an idle adapter adds no cost to a cycle, because it is in no collection that is walked through here; a
chunk is charged to its tenant's counter when it is planned; planning reads at most one chunk of an adapter more than it
plans, because a cycle takes a few chunks of a thousand long logs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog, ReadyChunks
from coordinator.operations.operation import Kind
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.cost_model import LONE_PART, SHARED_PART, START_TOKENS, CycleCosts, TokenBudget
from coordinator.scheduling.state_budget import StateCandidate, StateCost, StateCosts, plan_states
from coordinator.scheduling.virtual_counters import FairState, charged, decode_share, lifted, reweighed
from coordinator.scheduling.worker_losses import Quarantine
from workers.contract.messages import AdapterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An adapter that may have something to run in a pass."""

    adapter_id: str
    tenant_id: str
    worker_id: str
    """The worker of its copy; empty: it may be placed on any worker."""
    chunk_tokens: Iterable[int]
    """Tokens of its ready chunks, in the order in which they must run; each iteration yields the same."""
    last_cycle_id: int
    """The cycle that last had it; 0: none."""


class ReadySet:
    """The adapters of one base model that could be in the next cycle."""

    def __init__(
        self, group: AdapterGroup, quarantine: Quarantine, snapshots: Snapshots, publishing: Publishing
    ) -> None:
        self._group = group
        self._quarantine = quarantine
        self._snapshots = snapshots
        self._publishing = publishing
        self._is_stopping = False
        self._ahead: dict[str, AdapterLog] = {}
        """Adapters whose copies may be ahead of their snapshots."""
        self._last_cycle: dict[str, int] = {}
        self._last_states: dict[str, int] = {}
        """Adapter to the cycle that last saved or loaded a state of it."""

    def stop(self) -> None:
        """Stop beginning operations; those that have run in part may continue."""
        self._is_stopping = True

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self._ahead.pop(adapter_id, None)
        self._last_cycle.pop(adapter_id, None)
        self._last_states.pop(adapter_id, None)

    def ran(self, adapter_ids: Iterable[str]) -> None:
        """Record that workers returned results for these adapters."""
        logs = self._group.logs
        self._ahead.update((name, logs[name]) for name in adapter_ids if name in logs)

    def planned(self, adapter_id: str, cycle_id: int) -> None:
        """Record that the adapter is in the pass of this cycle."""
        self._last_cycle[adapter_id] = cycle_id

    def planned_states(self, adapter_ids: Iterable[str], cycle_id: int) -> None:
        """Record that this cycle saves or loads states of the adapters."""
        self._last_states.update(dict.fromkeys(adapter_ids, cycle_id))

    def refresh(self) -> bool:
        """Drop idle adapters and release quarantined ones that survived; return whether any adapter may run."""
        self._group.mark_clean([name for name, log in self._group.dirty.items() if not log.is_ready()])
        self._release_survivors()
        return any(True for _ in self.allowed())

    def dirty(self) -> list[AdapterLog]:
        """Return all adapters that changed, whether or not they may run."""
        return list(self._group.dirty.values())

    def allowed(self) -> Iterator[AdapterLog]:
        """Yield the ready adapters that may run; during a stop, only adapters in the middle of an operation."""
        for log in self._group.dirty.values():
            if not self._quarantine.may_run(log.adapter_id) or (self._is_stopping and log.is_between_operations):
                continue
            if not self.waits_for_file(log):
                yield log

    def tenants(self) -> frozenset[str]:
        """Return the tenants of the adapters that may run."""
        return frozenset(log.tenant_id for log in self.allowed())

    def has_tokens(self, num_tokens: int) -> bool:
        """Return whether the ready chunks have at least this many tokens."""
        for log in self.allowed():
            for chunk_tokens in ReadyChunks(log):
                num_tokens -= chunk_tokens
                if num_tokens <= 0:
                    return True
        return False

    def candidates(self) -> list[Candidate]:
        """Return the adapters that may have ready chunks."""
        return [
            Candidate(
                adapter_id=log.adapter_id,
                tenant_id=log.tenant_id,
                worker_id=log.worker_id,
                chunk_tokens=ReadyChunks(log),
                last_cycle_id=self._last_cycle.get(log.adapter_id, 0),
            )
            for log in self.allowed()
        ]

    def due_steps(self) -> Iterator[AdapterLog]:
        """Yield the adapters with operations for the step phase; each is examined when it is yielded."""
        for log in list(self.allowed()):
            log.advance()
            if next(log.ready_states(), None) is not None:
                yield log

    def state_candidate(self, log: AdapterLog, costs: StateCosts) -> StateCandidate:
        """Return an adapter with its saves and loads that may run now. Call `advance` first."""
        return StateCandidate(
            adapter_id=log.adapter_id,
            tenant_id=log.tenant_id,
            costs=(costs.of(each.kind, log.spec) for each in log.ready_states() if each.kind.moves_state),
            last_cycle_id=self._last_states.get(log.adapter_id, 0),
        )

    def residents(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """Return how many adapters have a copy on each of these workers."""
        return self._group.residency.counts(worker_ids)

    def ahead(self) -> list[AdapterLog]:
        """Return the adapters whose copies ran operations that their snapshots do not contain."""
        for name in [name for name, log in self._ahead.items() if not log.is_ahead]:
            del self._ahead[name]
        return list(self._ahead.values())

    def may_run(self, log: AdapterLog) -> bool:
        """Return whether the quarantine lets this adapter run."""
        return self._quarantine.may_run(log.adapter_id)

    def waits_for_file(self, log: AdapterLog) -> bool:
        """Return whether the adapter must wait for the writing of its snapshot or of its published weights.

        A copy is installed from the newest snapshot; a load brings a snapshot of its own and so cuts the log.
        """
        is_unsettled = self._snapshots.is_unsettled(log.adapter_id)
        if not is_unsettled and not self._publishing.is_unwritten(log.adapter_id):
            return False
        log.advance()
        states = list(log.ready_states())
        is_loading = bool(states) and states[-1].kind is Kind.LOAD_STATE
        return is_loading or (is_unsettled and not log.worker_id)

    def _release_survivors(self) -> None:
        """Release quarantined adapters that ran their quarantined operations, or became idle."""
        while survivors := [log for name in self._quarantine.group if (log := self._survivor(name)) is not None]:
            for log in survivors:
                log.release()
                self._quarantine.release(log.adapter_id)

    def _survivor(self, name: str) -> AdapterLog | None:
        log = self._group.logs.get(name)
        if log is None:
            return None  # a sample
        has_run = log.copy.cursor >= log.quarantined[1]
        return log if has_run or name not in self._group.dirty else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """The first `num_chunks` ready chunks of each adapter, and where they run."""

    num_chunks: Mapping[str, int]
    """By adapter, in the order in which they were picked."""
    placements: Mapping[str, str]
    """Adapter to worker, for every adapter in `num_chunks`."""
    tokens: Mapping[str, int]
    """Worker to tokens of this pass."""


@dataclass(slots=True)
class _Unplanned:
    """A candidate with a chunk left."""

    candidate: Candidate
    rest: Iterator[int]
    cost: int
    """Tokens of its next chunk."""
    num_planned: int = 0


def plan_pass(
    candidates: Iterable[Candidate], state: FairState, residents: Mapping[str, int], budget_tokens: int
) -> tuple[PassPlan, FairState]:
    """Fill every worker's budget fairly.

    `residents` has the live workers and the number of adapters with a copy on each; a candidate whose worker is not
    among them waits. A worker always takes at least one chunk, so that a chunk above the budget runs too.
    """
    rotations: dict[str, deque[_Unplanned]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.last_cycle_id, c.adapter_id)):
        if not candidate.worker_id or candidate.worker_id in residents:
            rest = iter(candidate.chunk_tokens)
            if (cost := next(rest, None)) is not None:
                rotations.setdefault(candidate.tenant_id, deque()).append(_Unplanned(candidate, rest, cost))
    active = frozenset(rotations)
    shares = lifted(state.shares, active - state.active, active & state.active)

    num_chunks: dict[str, int] = {}
    placements: dict[str, str] = {}
    tokens = dict.fromkeys(residents, 0)
    placer = _Placer(rotations.values(), residents, budget_tokens)
    heap = [(shares[tenant].virtual_tokens, tenant) for tenant in rotations]
    heapq.heapify(heap)
    while heap and min(tokens.values(), default=budget_tokens) < budget_tokens:
        counter, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        first = rotation.popleft()
        adapter_id, cost = first.candidate.adapter_id, first.cost
        worker = placements.get(adapter_id) or first.candidate.worker_id or placer.choose()
        if tokens[worker] == 0 or tokens[worker] + cost <= budget_tokens:
            if adapter_id not in placements and not first.candidate.worker_id:
                placer.placed(first.candidate, worker)
            first.num_planned += 1
            placements[adapter_id] = worker
            num_chunks[adapter_id] = first.num_planned
            tokens[worker] += cost
            shares[tenant] = shares[tenant].charged(cost)
            counter = shares[tenant].virtual_tokens
            if (cost_next := next(first.rest, None)) is not None:
                first.cost = cost_next
                rotation.append(first)
        if rotation:
            heapq.heappush(heap, (counter, tenant))
    return (
        PassPlan(num_chunks=num_chunks, placements=placements, tokens=tokens),
        FairState(shares=shares, active=active),
    )


class _Placer:
    """Places adapters without a copy on the worker with the fewest tokens of residents and of adapters placed there."""

    def __init__(
        self, rotations: Iterable[Iterable[_Unplanned]], residents: Mapping[str, int], budget_tokens: int
    ) -> None:
        self._num_residents = dict(residents)
        self._budget_tokens = budget_tokens
        self._load = dict.fromkeys(residents, 0)
        candidates = [each.candidate for rotation in rotations for each in rotation]
        if len(residents) > 1 and not all(candidate.worker_id for candidate in candidates):
            for candidate in candidates:
                if candidate.worker_id:
                    self._load[candidate.worker_id] += self._tokens(candidate)

    def choose(self) -> str:
        """Return the worker for a candidate without a copy."""
        return min(self._load, key=lambda worker: (self._load[worker], self._num_residents[worker], worker))

    def placed(self, candidate: Candidate, worker_id: str) -> None:
        """Count a candidate that was placed on this worker."""
        self._num_residents[worker_id] += 1
        self._load[worker_id] += self._tokens(candidate)

    def _tokens(self, candidate: Candidate) -> int:
        """Count its ready tokens, up to the budget: a long log must not make planning long."""
        total = 0
        for num_tokens in candidate.chunk_tokens:
            total += num_tokens
            if total >= self._budget_tokens:
                break
        return total


def place(residents: Mapping[str, int]) -> str:
    """Return the live worker with the fewest adapters, for an adapter that needs no pass; empty if none is live."""
    return min(residents, key=lambda worker: (residents[worker], worker), default="")


class Planning:
    """The planning of one base model's cycles."""

    def __init__(
        self,
        base_model: str,
        ready: ReadySet,
        budget: TokenBudget,
        costs: CycleCosts,
        fleet: Fleet,
        fair: FairState,
    ) -> None:
        self.base_model = base_model
        self.ready = ready
        self.budget = budget
        self.costs = costs
        self._state_costs = StateCosts()
        self._fleet = fleet
        self._fair = fair
        self._ready_on: dict[str, set[str]] = {}
        """Worker to the tenants that had a chunk ready there at the last plan, whether or not it was planned. An empty
        name: adapters that have no copy and were not planned."""

    def decode_share(self, worker_id: str, sampling: Collection[str], training: Collection[str]) -> float:
        """Return the part of a worker's time that decode steps get while these tenants sample and train there.

        Tenants whose chunks wait for the next cycle train as well: otherwise short cycles would leave them less time.
        """
        waiting = (self._ready_on.get(name, set()) for name in (worker_id, ""))
        return decode_share(sampling, set(training).union(*waiting), self._fair.shares)

    def has_workers(self) -> bool:
        """Return whether a worker of this base model is live."""
        return bool(self._fleet.live(self.base_model))

    def is_full(self) -> bool:
        """Return whether the ready chunks fill the budget of every worker."""
        return self.ready.has_tokens(self.budget.tokens * max(1, len(self._fleet.live(self.base_model))))

    def residents(self) -> dict[str, int]:
        """Return how many adapters have a copy on each live worker."""
        return self.ready.residents(worker.worker_id for worker in self._fleet.live(self.base_model))

    def plan(self) -> PassPlan:
        """Choose the chunks of the next pass and where they run; charge them to the virtual counters."""
        candidates = self.ready.candidates()
        self.budget.update(self._part_of_time({candidate.tenant_id for candidate in candidates}))
        plan, self._fair = plan_pass(candidates, self._fair, self.residents(), self.budget.tokens)
        self._ready_on = {}
        for candidate in candidates:
            if candidate.tenant_id in self._fair.active:
                worker_id = plan.placements.get(candidate.adapter_id, candidate.worker_id)
                self._ready_on.setdefault(worker_id, set()).add(candidate.tenant_id)
        return plan

    def _part_of_time(self, training: Collection[str]) -> float:
        """Return the part of `cycle_s_max` that the next pass may take: decoding gets the rest of its time.

        The tenants of the last plan count as active: one that awaits each of its steps misses every other cycle.
        """
        workers = (self._fleet.worker(info.worker_id) for info in self._fleet.live(self.base_model))
        sampling = {flight.tenant_id for worker in workers for flight in worker.samples.values()}
        part = SHARED_PART if len(self._fair.active.union(training, sampling)) > 1 else LONE_PART
        return part * (1.0 - decode_share(sampling, training, self._fair.shares)) if sampling else part

    def plan_states(self, logs: Sequence[AdapterLog], cycle_id: int) -> Mapping[str, int]:
        """Choose how many saves and loads of these adapters run in the step phase. `charge` them when they ran."""
        if not logs:
            return {}
        candidates = [self.ready.state_candidate(log, self._state_costs) for log in logs]
        num_planned, self._fair = plan_states(candidates, self._fair, self._tokens_per_s())
        self.ready.planned_states(num_planned, cycle_id)
        return num_planned

    def charge(self, tenant_id: str, seconds: float) -> None:
        """Charge measured seconds of an engine or of files to a tenant's counter: saves, loads, installs, exports.

        Becomes durable with the tenant's next cycle; a crash before that loses the charge, as it loses the work.
        """
        self._fair = charged(self._fair, tenant_id, seconds * self._tokens_per_s())

    def weigh(self, tenant_id: str, weight: float) -> None:
        """Plan with another weight of a tenant from now on."""
        shares = reweighed(self._fair.shares, tenant_id, weight, self._fair.active)
        self._fair = FairState(shares=shares, active=self._fair.active)

    def _tokens_per_s(self) -> float:
        """Return the tokens that a second of a worker is worth."""
        pass_s = self.costs.predicted_s(self.budget.tokens, 0.0)
        return self.budget.tokens / pass_s if pass_s else float(START_TOKENS)

    def observe_states(self, kind: Kind, spec: AdapterSpec, num_bytes: int, seconds: float) -> None:
        """Record what a save or a load took."""
        self._state_costs.observe(kind, spec, StateCost(num_bytes, seconds))

    def left_over(self, plan: PassPlan) -> Iterator[AdapterLog]:
        """Yield adapters with a copy on a live worker whose ready passes are not in the plan."""
        for log in self.ready.allowed():
            is_left = log.adapter_id not in plan.num_chunks and self._fleet.is_live(log.worker_id)
            if is_left and next(log.ready_passes(), None) is not None:
                yield log

    def counters(self, tenants: frozenset[str]) -> dict[str, float]:
        """Return the virtual counters of these tenants, to be committed with the cycle."""
        return {t: self._fair.shares[t].virtual_tokens for t in sorted(tenants) if t in self._fair.shares}
