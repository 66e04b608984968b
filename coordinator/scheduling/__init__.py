"""Decides which operations run next, and where: planner, ready set, quarantine, clock, fair queue, cost model.

Public interface:

- `planning.Planning`: plans the passes of one base model (`planner.PassPlan`, `planner.place`);
- `ready_set.ReadySet`, `quarantine.Quarantine`: the adapters that have something to run, and those that may run now;
- `clock.CycleClock`: when a cycle starts; `deadlines.Deadlines`: how long a batch may take;
- `cost_model.CycleCosts`, `budget.TokenBudget`: measured costs, and the tokens of a cycle;
- `virtual_counters` (`Share`, `FairState`), `fair_queue.FairQueue` (samples), `decode_share`: fairness;
- `losses.LossRecorder`: declares a worker lost; its receivers read `WorkerLoss` events.

Must not depend on how a plan is run, on transports, or on SQL.
"""
