"""Decides which operations of adapters run next, and where: planner, clock, cost model, losses.

Public interface:

- `schedule`: `Scheduling` and its `Schedule` of each base model, put together by `make_scheduling`;
- `planner.Planning`: plans the passes of one base model (`PassPlan`) from its `ready_set.ReadySet`, and
  places adapters by their `recent_load`;
- `clock.CycleClock`: when a cycle starts; `cost_model.Deadlines`: how long a batch may take; `state_budget`: the
  steps, saves and loads of a step phase; `adapter_costs.Costs`: what adapters cost besides tokens;
- `virtual_counters` (`Share`, `FairState`, `decode_share`): fairness;
- `worker_losses`: `LossRecorder` declares a worker lost, receivers read `WorkerLoss` events; `replay_differs`;
- `quarantine.Quarantine`: the adapters and samples that may have caused a loss;
- `classes.Classes`: on which workers an adapter keeps its bits;
- `worker_memory.WorkerMemory`: which copies leave a worker whose memory is full, and who waits for room;
- `probation.Probation`: tenants whose operations killed workers; `solo_turns.SoloTurns`: their turns.

Must not depend on how a plan is run, on transports, or on SQL.
"""
