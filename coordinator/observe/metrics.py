"""The counters and histograms of this process, for Prometheus.

Rooms count here what they do; only `/metrics` reads it. Names, units and types follow Prometheus's
conventions. Every label has a bounded set of values: no label has the id of an adapter, an operation or a tenant.
Gauges, which are read when they are asked for, are in `coordinator.runtime.gauges`.

The instruments belong to the process, as prometheus-client means it: a process serves one pool.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from coordinator.observe.timeline import Seconds
from tinkerpool.v1 import history_pb2, pool_pb2

disable_created_metrics()  # type: ignore[no-untyped-call]  # no second series with the start of each counter
REGISTRY = CollectorRegistry()
"""Everything that `/metrics` shows."""
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of what takes milliseconds, in seconds."""
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of what takes as long as a queue is, in seconds."""
PARTS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

CYCLES = Counter("tinkerpool_cycles", "Cycles that have committed.", ("base_model",), registry=REGISTRY)
CYCLE_SECONDS = Histogram(
    "tinkerpool_cycle_seconds",
    "Seconds of a cycle's phases: pass, step, commit.",
    ("base_model", "phase"),
    buckets=SHORT_S,
    registry=REGISTRY,
)
WORKER_PHASE_SECONDS = Histogram(
    "tinkerpool_worker_phase_seconds",
    "Seconds of a worker's work in a cycle, by phase: pack, forward, loss, backward, step.",
    ("base_model", "phase"),
    buckets=SHORT_S,
    registry=REGISTRY,
)
CYCLE_TENANTS = Histogram(
    "tinkerpool_cycle_tenants",
    "Tenants in a cycle.",
    ("base_model",),
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
    registry=REGISTRY,
)
CYCLE_BUDGET_USED = Histogram(
    "tinkerpool_cycle_budget_used_ratio",
    "Part of the budget that a planned pass uses, of each worker in it.",
    ("base_model",),
    buckets=PARTS,
    registry=REGISTRY,
)
OPERATIONS = Counter(
    "tinkerpool_operations",
    "Operations with a committed outcome, by kind and outcome: succeeded, failed.",
    ("kind", "outcome"),
    registry=REGISTRY,
)
OPERATION_SECONDS = Histogram(
    "tinkerpool_operation_seconds",
    "Seconds from an operation's acceptance to its committed outcome.",
    ("kind",),
    buckets=LONG_S,
    registry=REGISTRY,
)
WAIT_SECONDS = Counter(
    "tinkerpool_operation_wait_seconds",
    "Seconds that finished operations waited before a worker began them, by reason.",
    ("reason",),
    registry=REGISTRY,
)
TOKENS = Counter(
    "tinkerpool_tokens",
    "Tokens through a base model, of operations with a committed outcome.",
    ("kind",),
    registry=REGISTRY,
)
ENGINE_SECONDS = Counter(
    "tinkerpool_engine_seconds", "Seconds of engine time of these operations.", ("kind",), registry=REGISTRY
)
PROMPT_TOKENS = Counter(
    "tinkerpool_prompt_tokens",
    "Tokens of sampled prompts, by whether an earlier prompt had left them in the cache.",
    ("cached",),
    registry=REGISTRY,
)
FIRST_TOKEN_SECONDS = Histogram(
    "tinkerpool_first_token_seconds",
    "Seconds from the acceptance of a streamed sample to its first token.",
    buckets=LONG_S,
    registry=REGISTRY,
)
PUBLISH_SECONDS = Histogram(
    "tinkerpool_publish_seconds",
    "Seconds in which a published version's file was written and became durable.",
    buckets=SHORT_S,
    registry=REGISTRY,
)
DATABASE_COMMIT_SECONDS = Histogram(
    "tinkerpool_database_commit_seconds",
    "Seconds of a group commit of the database, with its sync.",
    buckets=SHORT_S,
    registry=REGISTRY,
)
DATABASE_WRITES = Counter("tinkerpool_database_writes", "Writes in these group commits.", registry=REGISTRY)
DATABASE_BYTES = Counter(
    "tinkerpool_database_bytes", "Bytes of requests, results and history that were written.", registry=REGISTRY
)
INSTALLS = Counter("tinkerpool_adapter_installs", "Copies of adapters that were sent to workers.", registry=REGISTRY)
REPLAYS = Counter(
    "tinkerpool_replayed_operations", "Finished operations that ran again on a new copy.", registry=REGISTRY
)
SNAPSHOTS = Counter(
    "tinkerpool_snapshots", "Snapshots of adapters, by outcome: written, failed.", ("outcome",), registry=REGISTRY
)
WORKER_LOSSES = Counter(
    "tinkerpool_worker_losses", "Lost workers, by cause: died, overdue, silent, left.", ("cause",), registry=REGISTRY
)
REFUSALS = Counter(
    "tinkerpool_refusals", "Calls that were refused, by the reason of the error.", ("reason",), registry=REGISTRY
)
EVENT_LOOP_LAG_SECONDS = Histogram(
    "tinkerpool_event_loop_lag_seconds",
    "How late the coordinator's event loop runs a timer: for so long it served nobody.",
    buckets=SHORT_S,
    registry=REGISTRY,
)


def count_cycle(cycle: pool_pb2.Cycle) -> None:
    """Count a committed cycle."""
    base_model = cycle.base_model
    CYCLES.labels(base_model).inc()
    phases = {"pass": cycle.pass_seconds, "step": cycle.step_seconds, "commit": cycle.commit_seconds}
    for phase, seconds in phases.items():
        CYCLE_SECONDS.labels(base_model, phase).observe(seconds)
    for worker in cycle.workers:
        for phase, seconds in worker.seconds.items():
            WORKER_PHASE_SECONDS.labels(base_model, phase).observe(seconds)
    CYCLE_TENANTS.labels(base_model).observe(len({entry.tenant for entry in cycle.entries}))


def count_operation(
    kind: str, *, is_failed: bool, num_tokens: int, engine_s: float, waits: Seconds, seconds: float | None
) -> None:
    """Count an operation whose outcome has committed. `seconds`: since it was accepted; None: not known."""
    OPERATIONS.labels(kind, "failed" if is_failed else "succeeded").inc()
    if num_tokens:
        TOKENS.labels(kind).inc(num_tokens)
    if engine_s:
        ENGINE_SECONDS.labels(kind).inc(engine_s)
    for reason, waited_s in waits.items():
        WAIT_SECONDS.labels(_REASONS[reason]).inc(waited_s)
    if seconds is not None:
        OPERATION_SECONDS.labels(kind).observe(seconds)


_REASONS = {number: name.removeprefix("WAIT_REASON_").lower() for name, number in history_pb2.WaitReason.items()}
