"""Decides which operations of adapters run next, and where: planner, losses, clock, cost model.

Public interface:

- `schedule`: `Scheduling` and its `Schedule` of each base model, put together by `make_scheduling`;
- `planner.Planning`: plans the passes of one base model (`PassPlan`) from its `ready_set.ReadySet`;
- `clock.CycleClock`: when a cycle starts; `cost_model.Deadlines`: how long a batch may take;
- `virtual_counters` (`Share`, `FairState`, `decode_share`): fairness;
- `losses`: `LossRecorder` declares a worker lost, receivers read `WorkerLoss` events; `Quarantine` holds the
  operations that may have caused a loss; `replay_differs`;
- `probation.Probation`: tenants whose operations killed workers; `solo_turns.SoloTurns`: their turns.

Must not depend on how a plan is run, on transports, or on SQL.
"""
