"""The workers as the coordinator sees them: incarnations, liveness, and the adapters and versions that each one holds.

Public interface: `fleet.Fleet` (all workers and the facts of their base models), `worker.Incarnation` and
`worker.Flight` (an operation in flight on a worker), `adapter_copies.Residency` (adapters by worker).

Must not depend on operations, schedules, or how workers are started and called.
"""
