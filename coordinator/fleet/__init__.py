"""The workers as the coordinator sees them: incarnations, liveness, and the adapters and versions that each one holds.

Public interface, all in `fleet`: `Fleet` (all workers and the facts of their base models), `Incarnation`, `Flight` (an
operation in flight on a worker), `Residency` (adapters by worker).

Must not depend on operations, schedules, or how workers are started and called.
"""
