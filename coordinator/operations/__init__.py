"""Operations and their states, adapter logs, sessions, admission and the in-flight table.

Public interface:

- `operation`: `Operation`, its `Kind` and `Usage`; operations to and from rows of the log; errors as outcomes;
- `adapter_log`: `AdapterLog`, one adapter's operations by sequence number; `windows`: its gradient windows as rows;
- `copy`: `Copy`, the adapter's state on a worker, and `Ahead`, the operations that a worker may run next;
- `registry`: `AdapterRegistry`, and `AdapterGroup`, the adapters of one base model, with its `Arrivals`;
- `sessions`: `SessionTable` and `Session`;
- `admission`: `Admission`, the only way for a `Request` to become an operation; `storage_error`;
- `ceilings`, `holdings` and `spending`: what a tenant may hold, holds and claims, and has used in a month;
- `in_flight`: `InFlightTable`, operations without a committed outcome, and the waits for them; `FinishedSamples` of the
  clients that poll; `SampleNumbers`;
- `history`: `Entries`, what became of operations, as the history has it;
- `epoch`: `Context`, and `Registers`: all of these for one epoch, put together by `open_registers`.

Must not depend on scheduling, on how workers are called, or on a transport.
"""
