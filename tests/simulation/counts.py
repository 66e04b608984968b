"""What limits count, compared with the rows at the end of a history: nothing is in flight then."""

from __future__ import annotations

from coordinator.operations.holdings import NO_CLAIM
from coordinator.runtime.core import Core
from coordinator.storage.schema import ROW_BYTES
from tests.simulation.oracle import Mismatch

STORED_BYTES = f"""SELECT SUM(num_bytes) FROM (
    SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) AS num_bytes FROM sessions
    UNION ALL SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) + length(payload) FROM adapters
    UNION ALL SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) + size_bytes FROM checkpoints
    UNION ALL SELECT samplers.tenant_id, {ROW_BYTES} + length(payload) + file_bytes FROM samplers
    UNION ALL SELECT tenant_id, num_bytes FROM sample_records
    UNION ALL SELECT tenant_id, {ROW_BYTES} + length(entry) FROM history
    UNION ALL SELECT tenant_id, {ROW_BYTES} FROM operations
    UNION ALL SELECT tenant_id, length(payload) FROM operations JOIN payloads USING (target_id, seq)
    UNION ALL SELECT tenant_id, length(outcome) FROM operations JOIN outcomes USING (target_id, seq)
) WHERE tenant_id = ?"""
"""The bytes of a tenant's rows and of the files that they name, without the states of its adapters."""


def check_counts(core: Core) -> None:
    """Compare the counts of every tenant with its rows. Raises Mismatch."""
    for tenant in core.store.tenants.all():
        tenant_id = tenant.tenant_id
        counted = {
            "claims": core.in_flight.claimed(tenant_id) != NO_CLAIM,
            "sessions": core.ceilings.sessions.used(tenant_id),
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
            "stored bytes": _number(core, STORED_BYTES, tenant_id) + _state_bytes(core, tenant_id),
        }
        entries = "SELECT COUNT(*) FROM history WHERE tenant_id = ?"
        counted["entries"] = _number(core, "SELECT history_rows FROM tenants WHERE tenant_id = ?", tenant_id)
        rows["entries"] = _number(core, entries, tenant_id)
        if counted != rows:
            raise Mismatch(f"limits of {tenant.name} count {counted}, its rows are {rows}")
        twice = "SELECT COUNT(*) - COUNT(DISTINCT target_id || seq) FROM history WHERE seq > 0 AND tenant_id = ?"
        if _number(core, twice, tenant_id):
            raise Mismatch(f"operations of {tenant.name} are in the history more than once")
        months, days, used = [
            _number(core, f"SELECT SUM(num_tokens) FROM {table} WHERE tenant_id = ?", tenant_id)
            for table in ("usage_months", "usage_days", "usage")
        ]
        if months != used:
            raise Mismatch(f"{tenant.name} has {months} tokens in its months, and used {used}")
        if days != used and tenant.deletion_at is None:  # a deletion takes its days away first
            raise Mismatch(f"{tenant.name} has {days} tokens in its days, and used {used}")


def _state_bytes(core: Core, tenant_id: str) -> int:
    logs = (log for log in core.registry.logs.values() if log.tenant_id == tenant_id)
    return sum(core.holdings.state_bytes(log.spec, log.base_model) for log in logs)


def _number(core: Core, sql: str, tenant_id: str) -> int:
    row = core.store.database.read_one(sql, (tenant_id,))
    assert row is not None
    return int(row[0] or 0)
