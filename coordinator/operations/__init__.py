"""Operations and their states, adapter logs, sessions, admission and the in-flight table.

Public interface:

- `operation`: `Operation`, its `Kind` and `Usage`; operations to and from rows of the log; errors as outcomes;
- `adapter_log`: `AdapterLog`, one adapter's operations by sequence number, with the cursor of its copy on a worker;
- `registry`: `SessionTable` and `Session`; `AdapterRegistry`, and `AdapterGroup`, the adapters of one base model, with
  its `Arrivals`;
- `admission`: `Admission`, the only way for a `Request` to become an operation; `storage_error`;
- `in_flight`: `InFlightTable`, operations without a committed outcome, and the waits for them; `FinishedSamples` of the
  clients that poll; `SampleNumbers`;
- `epoch`: `Context`, and `Registers`: all of these for one epoch, put together by `open_registers`.

Must not depend on scheduling, on how workers are called, or on a transport.
"""
