"""Plans the passes of one base model: which adapters share the next pass, and on which worker each runs.

`ReadySet` has the adapters that may run. `plan_pass` is a pure function of the ready chunks and their costs, the
tenants' virtual counters and the token budget: the next chunk is one of the tenant with the lowest counter, and within
a tenant adapters are served round robin. An adapter in a slot of its worker goes before one that must be moved there,
until the others are some moves behind. `Planning` owns the state of planning between cycles. Does not depend on a
clock, the database, or how a plan is run.

Main invariants: a chunk is charged to its tenant's counter when it is planned, and what did not run is taken back
before the counter is durable; planning reads at most one chunk of an adapter more than it plans, because a cycle takes
a few chunks of a thousand long logs.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.observe.metrics import CYCLE_BUDGET_USED
from coordinator.observe.timeline import Reason
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind
from coordinator.scheduling.cost_model import LONE_PART, SHARED_PART, START_TOKENS, CycleCosts, TokenBudget
from coordinator.scheduling.ready_set import Candidate, ReadySet
from coordinator.scheduling.recent_load import RecentLoad
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.state_budget import SECONDS_MAX, StateCost, StateCosts, plan_states
from coordinator.scheduling.virtual_counters import (
    FairState,
    Share,
    charged,
    decode_share,
    lifted,
    reweighed,
    taken_back,
)
from coordinator.scheduling.worker_memory import WorkerMemory
from tinkerpool.v1 import history_pb2
from workers.contract.messages import AdapterSpec, PassItem

MOVES_BEHIND = 8
"""An adapter that must be moved into a slot waits until its tenant is as many moves behind, or, among adapters of one
tenant, as many cycles. This bounds both the time that moves take and the wait of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """The first `num_chunks` ready chunks of each adapter, and where they run."""

    num_chunks: Mapping[str, int]
    """By adapter, in the order in which they were picked."""
    placements: Mapping[str, str]
    """Adapter to worker, for every adapter in `num_chunks`."""
    tokens: Mapping[str, float]
    """Worker to the cost of this pass, in tokens."""
    charges: Mapping[str, float]
    """Adapter to its part of that cost."""
    floors: Mapping[str, float]
    """Tenant to its virtual counter before this plan."""
    without_slot: Collection[str] = frozenset()
    """Adapters that found no slot on their worker."""


@dataclass(slots=True)
class _Unplanned:
    """A candidate with a chunk left."""

    candidate: Candidate
    rest: Iterator[int]
    move: float
    """Tokens that its move into a slot costs; 0: it is in one, or the move is planned."""
    cost: float
    """Tokens of its next chunk, item and move."""
    num_planned: int = 0

    def next_chunk(self) -> bool:
        """Go on to the next chunk; return whether there is one."""
        if (num_tokens := next(self.rest, None)) is None:
            return False
        self.move, self.cost = 0.0, num_tokens + self.candidate.item
        return True


def plan_pass(
    candidates: Iterable[Candidate],
    state: FairState,
    residents: Mapping[str, int],
    budget_tokens: int,
    avoided: str = "",
    crowded: Mapping[str, Collection[str]] = {},
    slots: Mapping[str, int] = {},
    loads: Mapping[str, float] = {},
) -> tuple[PassPlan, FairState]:
    """Fill every worker's budget fairly.

    `residents` has the live workers and the number of adapters with a copy on each; a candidate whose worker is not
    among them waits. A worker always takes at least one chunk, so that a chunk above the budget runs too, and no more
    adapters than it has `slots`, so that their steps find them there. What is left behind a chunk that does not fit
    goes to others, until they are a budget ahead of its tenant. No candidate is placed on the worker `avoided`, unless
    it is the only one, or on one that is `crowded` for it, by adapter. `loads` has the tokens that the adapters of each
    worker took of a pass lately: the next one is placed where least is going on.
    """
    rotations: dict[str, deque[_Unplanned]] = {}
    for candidate in sorted(candidates, key=_turn):
        if not candidate.home or candidate.home in residents:
            rest, move = candidate.chunks(), candidate.move
            if (num_tokens := next(rest, None)) is not None:
                unplanned = _Unplanned(candidate, rest, move, num_tokens + candidate.item + move)
                rotations.setdefault(candidate.tenant_id, deque()).append(unplanned)
    active = frozenset(rotations)
    shares = lifted(state.shares, active - state.active, active & state.active)
    floors = {tenant: shares[tenant].virtual_tokens for tenant in rotations}

    num_chunks: dict[str, int] = {}
    placements: dict[str, str] = {}
    charges: dict[str, float] = {}
    tokens: dict[str, float] = dict.fromkeys(residents, 0.0)
    limits: dict[str, float] = dict.fromkeys(residents, math.inf)
    num_free = {worker: slots.get(worker, math.inf) for worker in residents}
    without_slot: set[str] = set()
    placer = _Placer(rotations.values(), residents, loads, budget_tokens, avoided)
    heap = [(_place(shares[tenant], rotation), tenant) for tenant, rotation in rotations.items()]
    heapq.heapify(heap)
    while heap and min(tokens.values(), default=budget_tokens) < budget_tokens:
        place, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        first = rotation.popleft()
        adapter_id, cost, is_new = first.candidate.adapter_id, first.cost, not first.num_planned
        worker = placements.get(adapter_id) or first.candidate.home or placer.choose(crowded.get(adapter_id, ()))
        fits = num_free[worker] >= is_new and (tokens[worker] == 0 or tokens[worker] + cost <= budget_tokens)
        if not fits:
            if num_free[worker] < is_new:
                without_slot.add(adapter_id)
            limits[worker] = min(limits[worker], place + budget_tokens)
        elif place <= limits[worker]:
            if is_new and not first.candidate.home:
                placer.placed(first.candidate, worker)
            num_free[worker] -= is_new
            first.num_planned += 1
            placements[adapter_id] = worker
            num_chunks[adapter_id] = first.num_planned
            charges[adapter_id] = charges.get(adapter_id, 0.0) + cost
            tokens[worker] += cost
            shares[tenant] = shares[tenant].charged(cost)
            if first.next_chunk():
                rotation.append(first)
        if rotation:
            heapq.heappush(heap, (_place(shares[tenant], rotation), tenant))
    plan = PassPlan(
        num_chunks=num_chunks,
        placements=placements,
        tokens=tokens,
        charges=charges,
        floors=floors,
        without_slot=without_slot,
    )
    return plan, FairState(shares=shares, active=active)


def _turn(candidate: Candidate) -> tuple[int, str]:
    """Return the place of an adapter among those of its tenant."""
    return candidate.last_cycle_id + (MOVES_BEHIND if candidate.move else 0), candidate.adapter_id


def _place(share: Share, rotation: Sequence[_Unplanned]) -> float:
    """Return the place of a tenant among all: its counter, and some moves of its next adapter if that must be moved."""
    return share.virtual_tokens + MOVES_BEHIND * rotation[0].move / share.weight


class _Placer:
    """Places adapters without a copy on the worker with the fewest tokens: what is ready or ran there lately."""

    def __init__(
        self,
        rotations: Iterable[Iterable[_Unplanned]],
        residents: Mapping[str, int],
        loads: Mapping[str, float],
        budget_tokens: int,
        avoided: str,
    ) -> None:
        self._avoided = avoided
        self._num_residents = dict(residents)
        self._budget_tokens = budget_tokens
        self._load = dict.fromkeys(residents, 0.0)
        candidates = [each.candidate for rotation in rotations for each in rotation]
        if len(residents) > 1 and not all(candidate.home for candidate in candidates):
            for candidate in candidates:
                if candidate.home in self._load:
                    self._load[candidate.home] += self._tokens(candidate)
        self._load = {worker: max(number, loads.get(worker, 0.0)) for worker, number in self._load.items()}

    def choose(self, crowded: Collection[str]) -> str:
        """Return the worker for a candidate without a copy: none of the `crowded` ones, if there is another.

        And of the rest not the avoided one, if there is another.
        """
        workers = [worker for worker in self._load if worker not in crowded] or list(self._load)
        workers = [worker for worker in workers if worker != self._avoided] or workers
        return min(workers, key=lambda worker: (self._load[worker], self._num_residents[worker], worker))

    def placed(self, candidate: Candidate, worker_id: str) -> None:
        """Count a candidate that was placed on this worker."""
        self._num_residents[worker_id] += 1
        self._load[worker_id] += self._tokens(candidate)

    def _tokens(self, candidate: Candidate) -> float:
        """Count the cost of its ready chunks, up to the budget: a long log must not make planning long."""
        total = 0.0
        for num_tokens in candidate.chunks():
            total += num_tokens + candidate.item
            if total >= self._budget_tokens:
                break
        return total


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
        turns: SoloTurns,
        memory: WorkerMemory,
    ) -> None:
        self.base_model = base_model
        self.ready = ready
        self.budget = budget
        self.costs = costs
        self._state_costs = StateCosts()
        self._fleet = fleet
        self._fair = fair
        self._turns = turns
        self.memory = memory
        self._recent = RecentLoad()
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
        """Return whether a worker of this base model takes work."""
        return bool(self._fleet.available(self.base_model))

    def has_live_workers(self) -> bool:
        """Return whether a worker of this base model is live; it may be late."""
        return bool(self._fleet.live(self.base_model))

    def is_full(self) -> bool:
        """Return whether the ready chunks fill the budget of every worker."""
        return self.ready.has_tokens(self.budget.tokens * max(1, len(self._fleet.available(self.base_model))))

    def residents(self) -> dict[str, int]:
        """Return how many adapters have a copy on each worker that takes work."""
        return self.ready.residents(worker.info.worker_id for worker in self._fleet.available(self.base_model))

    def place(self, log: AdapterLog, residents: Mapping[str, int]) -> str:
        """Return the worker with the fewest adapters, for an adapter that needs no pass; empty if there is none."""
        workers = self._turns.workers_for(log, residents)
        crowded = frozenset() if self._turns.has_turn(log.adapter_id) else self.memory.crowded(log)
        with_room = workers.keys() - crowded
        return min(with_room, key=lambda worker: (workers[worker], worker), default="")

    def plan(self, now: float) -> PassPlan:
        """Choose the chunks of the next pass and where they run; charge them to the virtual counters.

        `now`: service time in seconds.
        """
        for tenant_id, seconds in self._turns.take_charges():
            self.charge({tenant_id: seconds})
        slots = self._slots()
        candidates = self.ready.candidates(slots)
        self.budget.update(self._part_of_time({candidate.tenant_id for candidate in candidates}))
        residents, avoided, crowded = self.residents(), self._turns.avoided, self.ready.crowded(candidates)
        must_place = len(residents) > 1 and not all(candidate.home for candidate in candidates)
        loads = self.ready.loads(self._recent.active(now)) if must_place else {}
        plan, self._fair = plan_pass(
            candidates, self._fair, residents, self.budget.tokens, avoided, crowded, slots, loads
        )
        self._recent.add(plan.charges, now)
        for num_tokens in filter(None, plan.tokens.values()):
            CYCLE_BUDGET_USED.labels(self.base_model).observe(num_tokens / self.budget.tokens)
        self._ready_on = {}
        for candidate in candidates:
            if candidate.tenant_id in self._fair.active:
                worker_id = plan.placements.get(candidate.adapter_id, candidate.home)
                self._ready_on.setdefault(worker_id, set()).add(candidate.tenant_id)
        return plan

    def _part_of_time(self, training: Collection[str]) -> float:
        """Return the part of `cycle_s_max` that the next pass may take: decoding gets the rest of its time.

        The tenants of the last plan count as active: one that awaits each of its steps misses every other cycle.
        """
        workers = self._fleet.available(self.base_model)
        sampling = {flight.tenant_id for worker in workers for flight in worker.samples.values()}
        part = SHARED_PART if len(self._fair.active.union(training, sampling)) > 1 else LONE_PART
        return part * (1.0 - decode_share(sampling, training, self._fair.shares)) if sampling else part

    def has_room(self, log: AdapterLog, worker: Incarnation) -> bool:
        """Return whether the worker has room for a copy of the adapter, or it is the adapter's solo turn."""
        return worker.has_room(self.memory.size_of(log)) or self._turns.has_turn(log.adapter_id)

    def plan_states(self, due: Sequence[tuple[AdapterLog, bool]], cycle_id: int, elapsed_s: float) -> Mapping[str, int]:
        """Choose how many operations of these adapters run in the step phase. `charge` them when they ran.

        `due`: each with whether its operations may begin. `elapsed_s`: seconds that the cycle has taken so far.
        """
        if not due:
            return {}
        tokens_per_s = self._tokens_per_s()
        if self.ready.are_few_steps(due, SECONDS_MAX * tokens_per_s):
            return {log.adapter_id: 1 for log, _ in due}
        candidates = self.ready.state_candidates(due, self._slots(), self._state_costs, tokens_per_s)
        steps_s_max = self.budget.seconds - elapsed_s
        num_planned, self._fair = plan_states(candidates, self._fair, tokens_per_s, steps_s_max)
        self.ready.planned_states(num_planned, cycle_id)
        return num_planned

    def charge(self, seconds: Mapping[str, float]) -> None:
        """Charge measured seconds of an engine or of files, by tenant: steps, saves, loads, installs, exports.

        Becomes durable with the tenant's next cycle; a crash before that loses the charge, as it loses the work.
        """
        tokens_per_s = self._tokens_per_s()
        self._fair = charged(self._fair, {tenant: number * tokens_per_s for tenant, number in seconds.items()})

    def charge_equally(self, seconds: float, tenants: Iterable[str]) -> None:
        """Charge seconds in equal parts to adapters, by the tenant of each one. No adapters: to nobody."""
        num_adapters = Counter(tenants)
        self.charge({each: seconds * number / num_adapters.total() for each, number in num_adapters.items()})

    def chunk_tokens(self, log: AdapterLog, item: PassItem) -> float:
        """Return what a chunk costs, in tokens."""
        return item.num_tokens + self.ready.costs.of(log.spec).item

    def take_back(self, num_tokens: Mapping[str, float], floors: Mapping[str, float]) -> None:
        """Take back what a plan charged for work that did not run, by tenant in tokens. Call before a commit.

        `floors`: those of that plan.
        """
        if num_tokens:
            self._fair = taken_back(self._fair, num_tokens, floors)

    def weigh(self, tenant_id: str, weight: float) -> None:
        """Plan with another weight of a tenant from now on."""
        shares = reweighed(self._fair.shares, tenant_id, weight, self._fair.active)
        self._fair = FairState(shares=shares, active=self._fair.active)

    def _slots(self) -> dict[str, int]:
        """Return the slots of each worker that takes work."""
        return {each.info.worker_id: each.info.num_slots for each in self._fleet.available(self.base_model)}

    def _tokens_per_s(self) -> float:
        """Return the tokens that a second of a worker is worth.

        Until cycles have shown what a token costs beside items: of a pass that fills the budget.
        """
        if token_s := self.ready.costs.token_s:
            return 1.0 / token_s
        pass_s = self.costs.predicted_s(self.budget.tokens, 0.0)
        return self.budget.tokens / pass_s if pass_s else float(START_TOKENS)

    def observe_states(self, kind: Kind, spec: AdapterSpec, num_bytes: int, seconds: float) -> None:
        """Record what a save or a load took."""
        self._state_costs.observe(kind, spec, StateCost(num_bytes, seconds))

    def waits(self, plan: PassPlan) -> Iterator[tuple[AdapterLog, Reason]]:
        """Yield the adapters with something to run that are not in the pass, each with what it waits for."""
        yield from self.ready.waiting()
        for log in self.ready.allowed():
            if log.adapter_id not in plan.num_chunks:
                if log.adapter_id in plan.without_slot:
                    yield log, history_pb2.WAIT_REASON_SLOTS
                elif next(self.ready.ahead(log).passes(), None) is not None:
                    yield log, history_pb2.WAIT_REASON_BUDGET
                else:
                    yield log, history_pb2.WAIT_REASON_CYCLE  # for its step phase

    def left_over(self, plan: PassPlan) -> Iterator[AdapterLog]:
        """Yield adapters with a copy on a live worker whose ready passes are not in the plan."""
        for log in self.ready.allowed():
            is_left = log.adapter_id not in plan.num_chunks and self._fleet.is_live(log.home)
            if is_left and next(self.ready.ahead(log).passes(), None) is not None:
                yield log

    def counters(self, tenants: frozenset[str]) -> dict[str, float]:
        """Return the virtual counters of these tenants, to be committed with the cycle."""
        return {t: self._fair.shares[t].virtual_tokens for t in sorted(tenants) if t in self._fair.shares}
