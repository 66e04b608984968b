"""Plans the passes of one base model, from its ready set, budget, virtual counters and workers.

Owns the state of planning between cycles; the plan itself is the pure function of `planner`. Does not depend on how a
plan is run. Main invariant: a chunk is charged to its tenant's counter when it is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.scheduling.budget import TokenBudget
from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.planner import PassPlan, plan_pass
from coordinator.scheduling.ready_set import ReadySet
from coordinator.scheduling.virtual_counters import FairState, Share


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
        self._fleet = fleet
        self._fair = fair

    @property
    def shares(self) -> Mapping[str, Share]:
        """Every tenant's weight and counter."""
        return self._fair.shares

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
        self.budget.update()
        plan, self._fair = plan_pass(self.ready.candidates(), self._fair, self.residents(), self.budget.tokens)
        return plan

    def left_over(self, plan: PassPlan) -> Iterator[AdapterLog]:
        """Yield adapters with a copy on a live worker whose ready passes are not in the plan."""
        for log in self.ready.allowed():
            is_left = log.adapter_id not in plan.num_chunks and self._fleet.is_live(log.worker_id)
            if is_left and next(log.ready_passes(), None) is not None:
                yield log

    def counters(self, tenants: frozenset[str]) -> dict[str, float]:
        """Return the virtual counters of these tenants, to be committed with the cycle."""
        return {t: self._fair.shares[t].virtual_tokens for t in sorted(tenants) if t in self._fair.shares}
