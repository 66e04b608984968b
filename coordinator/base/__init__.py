"""Errors, configuration, fatal failures, time and version: imported by every other room, imports none of them.

Public interface: `errors` (the kinds of errors; `ServiceError` and `Code`), `config` (every option of a coordinator and
its doors), `failure.Failure` (the first fatal error), `time.Time`, `version.VERSION`.
"""
