"""The history: what operations waited for, and the metrics of adapters by step."""

from __future__ import annotations

from functools import partial

from coordinator.base.errors import invalid, not_found
from coordinator.operations.operation import Kind, Operation
from coordinator.service.access import UseCases, uninterrupted
from coordinator.service.listings import PAGE_BYTES_MAX, number_of, rows_of_page
from coordinator.tenants.principals import Principal
from tinkerpool.names import parse_operation_name
from tinkerpool.v1 import history_pb2 as pb

METRICS_MAX, NAME_LENGTH_MAX = 64, 128
"""Metrics of one report, and characters of their names."""
SLICE_ROWS = 100
"""Rows that are read at a time: a page ends by its bytes."""
PACE_CYCLES = 20
"""Cycles from whose pace the rest of a wait is guessed."""


class HistoryUseCases(UseCases):
    """HistoryService."""

    async def get_history_entry(
        self, principal: Principal, request: pb.GetHistoryEntryRequest
    ) -> pb.GetHistoryEntryResponse:
        """Return what is known of an operation."""
        operation = self._core.in_flight.get(request.name)
        if operation is not None and operation.tenant_id == principal.tenant_id:
            return pb.GetHistoryEntryResponse(entry=self._unfinished(operation))
        row = self._core.store.history.of_operation(principal.tenant_id, *parse_operation_name(request.name))
        if row is None:
            raise not_found("operation in the history", request.name, other="a refused operation is not in it")
        return pb.GetHistoryEntryResponse(entry=pb.HistoryEntry.FromString(row.entry))

    async def list_history(self, principal: Principal, request: pb.ListHistoryRequest) -> pb.ListHistoryResponse:
        """List the entries of an adapter or sampler, oldest first."""
        num_left = rows_of_page(request.page_size)
        response, last_id, num_bytes = pb.ListHistoryResponse(), number_of(request.page_token), 0
        while num_left and num_bytes < PAGE_BYTES_MAX:
            num_asked = min(num_left, SLICE_ROWS)
            rows = self._core.store.history.page(principal.tenant_id, request.target_id, last_id, num_asked)
            for row in rows:
                response.entries.append(pb.HistoryEntry.FromString(row.entry))
                last_id, num_bytes = row.entry_id, num_bytes + len(row.entry)
            num_left -= len(rows)
            if len(rows) < num_asked:
                break
        response.next_page_token = str(last_id)
        response.has_more = bool(self._core.store.history.page(principal.tenant_id, request.target_id, last_id, 1))
        return response

    @uninterrupted
    async def report_metrics(self, principal: Principal, request: pb.ReportMetricsRequest) -> pb.ReportMetricsResponse:
        """Add a user's metrics to the history of an adapter, once if the call is repeated. Durable when it returns."""
        adapter = self._adapter(principal, request.adapter_id)
        if not 1 <= len(request.metrics) <= METRICS_MAX:
            raise invalid(f"{len(request.metrics)} metrics in one report: send 1 to {METRICS_MAX}")
        if not all(1 <= len(name) <= NAME_LENGTH_MAX for name in request.metrics):
            raise invalid(f"the name of a metric has 1 to {NAME_LENGTH_MAX} characters")
        if request.step < 0:
            raise invalid(f"step must be 0 or more, not {request.step}")
        self._core.admission.check_report(principal.tenant_id)
        entry = self._core.entries.reported(request)
        is_repeat = partial(self._core.entries.is_repeat, request)
        await self._core.store.history.report(principal.tenant_id, adapter.adapter_id, entry, is_repeat)
        return pb.ReportMetricsResponse()

    def _unfinished(self, operation: Operation) -> pb.HistoryEntry:
        position, clock = self._position(operation), self._wait_clock(operation)
        remaining_s = None if operation.kind is Kind.SAMPLE else self._remaining_s(operation)
        return self._core.entries.unfinished(operation, clock, position, remaining_s)

    def _position(self, operation: Operation) -> int:
        log = self._core.registry.get(operation.target_id)
        return sum(each.seq < operation.seq for each in log.unfinished()) if log is not None else 0

    def _remaining_s(self, operation: Operation) -> float | None:
        """Guess the rest of a wait: each optimizer step takes a cycle, and the adapter comes as often as lately."""
        log = self._core.registry.get(operation.target_id)
        if log is None:
            return None
        recent = [each for each in self._core.journal.recent if each.base_model == log.base_model][-PACE_CYCLES:]
        if len(recent) < 2 or log.missing_seq() is not None:
            return None
        span_s = (recent[-1].start_time.ToNanoseconds() - recent[0].start_time.ToNanoseconds()) / 1e9
        num_with = sum(any(entry.adapter_id == log.adapter_id for entry in each.entries) for each in recent)
        ahead = [each for each in log.unfinished() if each.seq <= operation.seq]
        num_cycles = max(1, sum(each.kind is Kind.OPTIM_STEP for each in ahead))
        return num_cycles * span_s / (len(recent) - 1) * len(recent) / max(1, num_with)
