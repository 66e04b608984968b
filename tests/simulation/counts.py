"""What limits count, compared with the rows at the end of a history: nothing is in flight then."""

from __future__ import annotations

from coordinator.operations.holdings import NO_CLAIM
from coordinator.runtime.core import Core
from tests.simulation.oracle import Mismatch


def check_counts(core: Core) -> None:
    """Compare the counts of every tenant with its rows. Raises Mismatch."""
    for tenant in core.store.tenants.all():
        tenant_id = tenant.tenant_id
        counted = {
            "claims": core.in_flight.claimed(tenant_id) != NO_CLAIM,
            "sessions": core.sessions.num_of(tenant_id),
            "samplers": core.sessions.num_samplers(tenant_id),
            "checkpoints": core.holdings.num_checkpoints(tenant_id),
            "stored bytes": core.holdings.num_bytes(tenant_id),
        }
        live = "tenant_id = ? AND session_id IN (SELECT session_id FROM sessions WHERE ended_at IS NULL)"
        rows = {
            "claims": 0,
            "sessions": _number(core, f"SELECT COUNT(*) FROM sessions WHERE {live}", tenant_id),
            "samplers": _number(core, f"SELECT COUNT(*) FROM samplers WHERE {live}", tenant_id),
            "checkpoints": _number(core, "SELECT COUNT(*) FROM checkpoints WHERE tenant_id = ?", tenant_id),
            "stored bytes": _number(core, "SELECT SUM(size_bytes) FROM checkpoints WHERE tenant_id = ?", tenant_id),
        }
        if counted != rows:
            raise Mismatch(f"limits of {tenant.name} count {counted}, its rows are {rows}")
        tokens = [
            _number(core, f"SELECT SUM(num_tokens) FROM {table} WHERE tenant_id = ?", tenant_id)
            for table in ("usage_months", "usage")
        ]
        if tokens[0] != tokens[1]:
            raise Mismatch(f"{tenant.name} has {tokens[0]} tokens in its months, and used {tokens[1]}")


def _number(core: Core, sql: str, tenant_id: str) -> int:
    row = core.store.database.read_one(sql, (tenant_id,))
    assert row is not None
    return int(row[0] or 0)
