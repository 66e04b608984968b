"""The timelines of sessions as files for Perfetto, made of the history while they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from coordinator.observe.session_trace import SessionTrace
from coordinator.service.access import UseCases, streamed
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import pool_pb2

PART_BYTES = 64 << 10
"""Bytes of packets after which a part of a file ends."""
SLICE_ENTRIES = 10
"""Entries that are made into packets at a time, in about a millisecond: other calls run between two slices."""


class SessionTraceUseCases(UseCases):
    """ExportSessionTrace of HistoryService."""

    @streamed
    async def export_session_trace(
        self, principal: Principal, request: pb.ExportSessionTraceRequest
    ) -> AsyncGenerator[pb.ExportSessionTraceResponse, None]:
        """Stream the timeline of a session."""
        async for part in self.session_trace(principal, request.session_id):
            yield pb.ExportSessionTraceResponse(data=part)

    async def check_session_trace(self, principal: Principal, session_id: str) -> None:
        """Refuse a session whose timeline the caller may not see, as one that does not exist."""
        self._traced_tenant(principal, session_id)

    async def session_trace(self, principal: Principal, session_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the file of a session's timeline in parts, made in slices by turns of the caller's tenant."""
        tenant_id = self._traced_tenant(principal, session_id)
        registry, history, turns = self._core.registry, self._core.store.history, self._core.listing_turns

        def name_of(adapter_id: str) -> str:
            log = registry.get(adapter_id)
            return log.name if log is not None else ""

        def cycle_of(cycle_id: int) -> pool_pb2.Cycle | None:
            return self._cycle(principal, cycle_id)

        trace, last_id, part = SessionTrace(session_id, name_of, cycle_of), 0, b""
        while True:
            async with turns.turn(principal.tenant_id) as turn:
                rows, last_id = history.of_session(tenant_id, session_id, last_id)
                turn.use(sum(len(row.entry) for row in rows))
            for first in range(0, len(rows), SLICE_ENTRIES):
                async with turns.turn(principal.tenant_id) as turn:
                    for row in rows[first : first + SLICE_ENTRIES]:
                        trace.add(pb.HistoryEntry.FromString(row.entry))
                    packets = trace.take()
                    turn.use(len(packets))
                part += packets
                if len(part) >= PART_BYTES:
                    yield part
                    part = b""
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not last_id:
                break
        trace.end_cycle()
        yield part + trace.take()

    def _traced_tenant(self, principal: Principal, session_id: str) -> str:
        """Return the tenant of a session: the caller's own, for an administrator any."""
        row = self._core.store.sessions.get(session_id) if principal.is_admin else None
        return (row or self._session_row(principal, session_id)).tenant_id

    def _cycle(self, principal: Principal, cycle_id: int) -> pool_pb2.Cycle | None:
        """Return what is stored of a cycle, without the phases of the workers for a member: they are everybody's."""
        summary = self._core.store.cycles.summary(cycle_id)
        if not summary:
            return None
        cycle = pool_pb2.Cycle.FromString(summary)
        if not principal.is_admin:
            del cycle.workers[:]
        return cycle
