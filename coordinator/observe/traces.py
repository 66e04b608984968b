"""Traces for OpenTelemetry: one of each operation, made of what was recorded about it when its outcome has committed.

A trace is under the span of the caller whose call brought the operation, if that sent a `traceparent`. A cycle, which
many operations share, is a trace of its own, to which the spans of its operations link. Spans have what the history
shows, and the tenant's id: no contents of requests, keys or names of tenants.

A pool that sends no traces has no `Traces`, and does not import this module: those that report to it check for None.
Depends on timelines and the contract's messages. Main invariants: nothing here waits for the collector, whose slowness
costs spans and not operations; what is held for operations that have not finished is bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator.base.config import VERSION
from coordinator.base.time import Time
from coordinator.observe.timeline import Timeline
from tinkerpool.history import kind_name, reason_of
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise ImportError(
        f"traces need more than a pool ({error}); install it with: pip install 'tinkerpool[otel]', or start without "
        "--otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT"
    ) from error

T = TypeVar("T")
HELD_MAX = 10_000
"""Unfinished operations whose calls are remembered, and finished ones that nobody has fetched. Beyond it the oldest are
dropped: their traces begin with their arrival and under no caller's span, or have no delivery."""
QUEUE_SPANS_MAX = 16_384
"""Spans that wait to be sent, some 1.5 KB each. Beyond it the oldest are dropped, with a warning in the log."""
CLOSE_S = 5.0
"""Longest wait at a stop for the spans that were not sent yet, in seconds."""

_PASSES = (ops_pb.OPERATION_KIND_FORWARD, ops_pb.OPERATION_KIND_FORWARD_BACKWARD)


@dataclass(frozen=True, slots=True)
class _Call:
    received: float
    """When a door took the call, in seconds of service time."""
    parent: Context
    """The caller's span; empty: it sent none."""


_call: ContextVar[_Call | None] = ContextVar("call", default=None)
"""The call that the present task serves. Tasks that a use case starts inherit it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A cycle in which a worker ran an operation or a part of it. Times are nanoseconds since 1970."""

    cycle: SpanContext
    cycle_id: int
    begin_ns: int
    pass_ended_ns: int
    steps_ended_ns: int


@dataclass(slots=True)
class _Open:
    """What only the traces need to know of an unfinished operation."""

    call: _Call
    accepted: float
    appended: float | None = None
    """When it was durable."""
    parts: list[_Part] = field(default_factory=list)
    """The earlier cycles in which chunks of it ran."""


class Traces:
    """The traces of one coordinator. All methods but `close` return at once."""

    def __init__(self, endpoint: str, time: Time) -> None:
        """`endpoint`: URL of a collector, to which spans are sent by OTLP over HTTP.

        Headers, certificates, sampling and attributes of the process are set by the variables that the OpenTelemetry
        specification names.
        """
        self._time = time
        named = Resource.create({SERVICE_NAME: "tinkerpool", SERVICE_VERSION: VERSION})
        resource = named.merge(OTELResourceDetector().detect())  # the operator's names win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX))
        self._tracer = self._provider.get_tracer("tinkerpool", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        """By operation."""
        self._unfetched: OrderedDict[str, tuple[Context, int]] = OrderedDict()
        """Finished operation to its span and the end of that."""
        self._cycles: dict[int, Span] = {}
        """The spans of cycles whose operations are being committed."""

    async def close(self) -> None:
        """Send what was not sent yet, as far as that takes no longer than `CLOSE_S`."""
        self._open.clear()
        self._unfetched.clear()
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, CLOSE_S)

    # ---- the way of an operation

    def receive(self, traceparent: str) -> None:
        """Note that the present task serves a call that has come now. `traceparent`: its header; empty: it has none."""
        carrier = {"traceparent": traceparent}
        _call.set(_Call(self._time.monotonic(), self._propagator.extract(carrier, Context())))

    def accept(self, name: str, now: float) -> None:
        """Note that the present call has brought this operation, which is accepted now, in service time."""
        _hold(self._open, name, _Open(_call.get() or _Call(now, Context()), now))

    def append(self, name: str) -> None:
        """Note that the operation is durable."""
        if (found := self._open.get(name)) is not None:
            found.appended = self._time.monotonic()

    def withdraw(self, name: str) -> None:
        """Drop an operation whose append failed: it gets no trace."""
        self._open.pop(name, None)

    def run_part(self, name: str, cycle: pool_pb2.Cycle) -> None:
        """Note that the operation ran in a cycle that is being committed, and goes on in a later one."""
        if (found := self._open.get(name)) is not None:
            found.parts.append(self._part(cycle))

    def commit(
        self,
        tenant_id: str,
        outcome: ops_pb.Operation,
        timeline: Timeline,
        cycle: pool_pb2.Cycle | None,
        phase_s: Mapping[str, float],
    ) -> None:
        """Make the trace of an operation whose outcome has committed, without its delivery.

        `cycle`: the one that decided it. `phase_s`: of a sample, see `SampleResult`.
        """
        now, zero_ns = self._time.monotonic(), self._zero_ns()
        opened = self._open.pop(outcome.name, None)
        received = opened.call.received if opened is not None else None
        began = next(each for each in (received, timeline.arrived, timeline.begun, now) if each is not None)
        root = self._tracer.start_span(
            kind_name(outcome.kind),
            opened.call.parent if opened is not None else Context(),
            SpanKind.SERVER,
            attributes=_of_operation(tenant_id, outcome, timeline),
            start_time=_ns(zero_ns, began),
        )
        if not root.is_recording():  # the caller's span is not sampled
            return
        parent = set_span_in_context(root, Context())
        if opened is not None:
            self._accepted(parent, opened, zero_ns)
        decided = timeline.decided if timeline.decided is not None else now
        ran = decided - sum(phase_s.values()) if phase_s else timeline.begun
        self._queued(parent, timeline, ran, zero_ns)
        if cycle is not None:
            parts = [*(opened.parts if opened is not None else ()), self._part(cycle)]
            self._in_cycles(parent, parts, timeline.begun, zero_ns, is_pass=outcome.kind in _PASSES)
        self._phases(parent, decided, phase_s, zero_ns)
        self._span(parent, "commit", _ns(zero_ns, decided), _ns(zero_ns, now))
        if outcome.state == ops_pb.OPERATION_STATE_FAILED:
            root.set_status(StatusCode.ERROR, outcome.error.reason)
        root.end(_ns(zero_ns, now))
        held = set_span_in_context(NonRecordingSpan(root.get_span_context()), Context())
        _hold(self._unfetched, outcome.name, (held, _ns(zero_ns, now)))

    def deliver(self, name: str) -> None:
        """Note that a caller has the outcome of a finished operation; the first time counts."""
        if (found := self._unfetched.pop(name, None)) is not None:
            parent, committed_ns = found
            self._span(parent, "delivery", committed_ns, _ns(self._zero_ns(), self._time.monotonic()))

    # ---- cycles

    def commit_cycle(self, cycle: pool_pb2.Cycle) -> None:
        """End the span of a cycle that has committed."""
        span, begin_ns = self._cycle(cycle), cycle.start_time.ToNanoseconds()
        self._cycles.pop(cycle.cycle_id)
        tenants = {entry.tenant for entry in cycle.entries}
        span.set_attributes(
            {
                "tinkerpool.cycle": cycle.cycle_id,
                "tinkerpool.base_model": cycle.base_model,
                "tinkerpool.tenants": len(tenants),
                "tinkerpool.adapters": len(cycle.entries),
                "tinkerpool.tokens": sum(entry.num_tokens for entry in cycle.entries),
                "tinkerpool.pass_seconds": cycle.pass_seconds,
                "tinkerpool.step_seconds": cycle.step_seconds,
                "tinkerpool.commit_seconds": cycle.commit_seconds,
            }
        )
        seconds = cycle.pass_seconds + cycle.step_seconds + cycle.commit_seconds
        span.end(begin_ns + int(seconds * 1e9))

    def _cycle(self, cycle: pool_pb2.Cycle) -> Span:
        """Return the span of a cycle that is being committed, which begins when it is first asked for."""
        if cycle.cycle_id not in self._cycles:
            self._cycles[cycle.cycle_id] = self._tracer.start_span(
                "cycle", Context(), start_time=cycle.start_time.ToNanoseconds()
            )
        return self._cycles[cycle.cycle_id]

    def _part(self, cycle: pool_pb2.Cycle) -> _Part:
        begin_ns = cycle.start_time.ToNanoseconds()
        pass_ended_ns = begin_ns + int(cycle.pass_seconds * 1e9)
        steps_ended_ns = pass_ended_ns + int(cycle.step_seconds * 1e9)
        context = self._cycle(cycle).get_span_context()
        return _Part(context, cycle.cycle_id, begin_ns, pass_ended_ns, steps_ended_ns)

    # ---- spans

    def _accepted(self, parent: Context, opened: _Open, zero_ns: float) -> None:
        """Add how an operation came into the log."""
        accepted_ns = _ns(zero_ns, opened.accepted)
        self._span(parent, "admission", _ns(zero_ns, opened.call.received), accepted_ns)
        if opened.appended is not None:
            self._span(parent, "append", accepted_ns, _ns(zero_ns, opened.appended))

    def _queued(self, parent: Context, timeline: Timeline, until: float | None, zero_ns: float) -> None:
        """Add the wait of an operation that a worker has begun, with its reasons."""
        if timeline.arrived is None or until is None:
            return
        waits = {reason_of(reason): seconds for reason, seconds in timeline.waits.items()}
        attributes: dict[str, AttributeValue] = {
            f"tinkerpool.wait.{reason}_seconds": seconds for reason, seconds in waits.items()
        }
        if waits:
            attributes["tinkerpool.wait.reason"] = max(waits, key=lambda reason: waits[reason])
        self._span(parent, "queued", _ns(zero_ns, timeline.arrived), _ns(zero_ns, until), attributes)

    def _in_cycles(
        self, parent: Context, parts: Sequence[_Part], begun: float | None, zero_ns: float, *, is_pass: bool
    ) -> None:
        """Add what ran of an operation in each cycle, with a link to the cycle. `begun`: when it was first sent."""
        name, begun_ns = "pass" if is_pass else "step", _ns(zero_ns, begun) if begun is not None else 0
        for part in parts:
            begin_ns = part.begin_ns if is_pass else part.pass_ended_ns
            end_ns = part.pass_ended_ns if is_pass else part.steps_ended_ns
            attributes = {"tinkerpool.cycle": part.cycle_id}
            self._span(parent, name, max(begin_ns, begun_ns), end_ns, attributes, [Link(part.cycle)])

    def _phases(self, parent: Context, decided: float, phase_s: Mapping[str, float], zero_ns: float) -> None:
        """Add the phases of a sample, the last of which ended when it was decided."""
        begin = decided - sum(phase_s.values())
        for phase, seconds in phase_s.items():
            self._span(parent, phase, _ns(zero_ns, begin), _ns(zero_ns, begin + seconds))
            begin += seconds

    def _span(
        self,
        parent: Context,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] | None = None,
    ) -> None:
        span = self._tracer.start_span(name, parent, attributes=attributes, links=links, start_time=begin_ns)
        span.end(max(begin_ns, end_ns))

    def _zero_ns(self) -> float:
        """Return the moment 0 of service time, by the wall clock as it is now."""
        return (self._time.wall() - self._time.monotonic()) * 1e9


def _ns(zero_ns: float, moment: float) -> int:
    """Return a moment of service time as nanoseconds since 1970."""
    return int(zero_ns + moment * 1e9)


def _hold(held: OrderedDict[str, T], name: str, value: T) -> None:
    """Add a value; drop the oldest one above `HELD_MAX`."""
    held[name] = value
    if len(held) > HELD_MAX:
        held.popitem(last=False)


def _of_operation(tenant_id: str, outcome: ops_pb.Operation, timeline: Timeline) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "tinkerpool.operation": outcome.name,
        "tinkerpool.kind": kind_name(outcome.kind),
        "tinkerpool.target": outcome.target_id,
        "tinkerpool.tenant": tenant_id,
        "tinkerpool.tokens": outcome.num_tokens,
        "tinkerpool.engine_seconds": outcome.engine_seconds,
        "tinkerpool.begins": timeline.num_begins,
    }
    if timeline.worker_id:
        attributes["tinkerpool.worker"] = timeline.worker_id
    if outcome.cycle_id:
        attributes["tinkerpool.cycle"] = outcome.cycle_id
    if outcome.error.reason:
        attributes["error.type"] = outcome.error.reason
    return attributes
