"""Errors, configuration, signals and time.

Public interface:

- `errors`: the kinds of errors; `ServiceError`, `Code`, functions that make common refusals; `EndableBlock`, which
  another task may end with a refusal; `Failure`, the first fatal error;
- `config`: every option of a coordinator and its doors; `VERSION`;
- `tenant_limits`: every limit of one tenant, with default, unit and reason;
- `memory`: blocks that go back to the system, short garbage collections;
- `time`: `Time`, `SystemTime`, `Signal`, and `within`, a time-out that a pause of the process does not trigger.

Imported by every other room; must not depend on any of them.
"""
