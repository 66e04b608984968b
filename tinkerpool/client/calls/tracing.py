"""The caller's span of OpenTelemetry, as a call carries it, so that a pool's trace of an operation is under it.

Needs nothing: a program without a span of its own has not imported OpenTelemetry, and then this module does not either.
The background loop runs a call in the context of the thread that asked for it, which has the span.
"""

from __future__ import annotations

import sys


def traceparent() -> str:
    """Return the W3C header `traceparent` of the present span; empty if there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else ""
