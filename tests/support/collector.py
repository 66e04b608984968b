"""An OpenTelemetry collector: receives spans by OTLP over HTTP, as protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What was received."""

    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    @property
    def resource(self) -> dict[str, Any]:
        """The attributes of the process that sent the first spans."""
        return attributes_of(self.requests[0].resource_spans[0].resource.attributes)

    @property
    def spans(self) -> list[Span]:
        """All spans, in the order of their ends."""
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def named(self, name: str) -> list[Span]:
        """Return the spans of this name."""
        return [span for span in self.spans if span.name == name]

    def operation(self, name: str) -> Span:
        """Return the span of an operation."""
        [span] = [each for each in self.spans if attributes_of(each.attributes).get("tinkerpool.operation") == name]
        return span

    def children(self, parent: Span) -> dict[str, Span]:
        """Return the spans below another one, by name."""
        found = [each for each in self.spans if each.parent_span_id == parent.span_id]
        assert all(each.trace_id == parent.trace_id for each in found)
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}


def attributes_of(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    """Return attributes as a dictionary."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            response = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
