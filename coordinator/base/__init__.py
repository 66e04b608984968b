"""Errors, configuration, fatal failures, signals, time and version.

Public interface:

- `errors`: the kinds of errors; `ServiceError`, `Code`, and functions that make common refusals;
- `config`: every option of a coordinator and its doors;
- `context.Context`: the settings, clock, epoch and fatal errors that all parts of a coordinator share;
- `failure.Failure`: the first fatal error; `signal.Signal`: a wake-up without data;
- `time`: `Time`, `SystemTime`, and `within`, a time-out that a pause of the process does not trigger;
- `version.VERSION`.

Imported by every other room; must not depend on any of them.
"""
