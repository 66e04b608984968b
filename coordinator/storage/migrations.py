"""The changes from each older format of the database that this version still reads to the next one.

Text only: `database` runs it, in one transaction with the new version's number. Main invariant: a migrated database has
the same columns, indexes and triggers as a new one.
"""

from coordinator.storage.schema import (
    API_KEYS,
    AUDIT,
    OPERATIONS,
    PROBATIONS,
    RECORDS,
    TENANT_LIMITS,
    USAGE_MONTHS,
)

_ACCOUNTS = f"""
ALTER TABLE tenants ADD COLUMN suspended_at REAL;
ALTER TABLE tenants ADD COLUMN suspension_reason TEXT NOT NULL DEFAULT '';
ALTER TABLE tenants ADD COLUMN deletion_at REAL;
ALTER TABLE api_keys RENAME TO api_keys_5;
{API_KEYS}
INSERT INTO api_keys (key_id, tenant_id, secret_sha256, role, created_at, revoked_at)
    SELECT key_id, tenant_id, secret_sha256, CASE WHEN is_admin THEN 'admin' ELSE 'member' END, created_at, revoked_at
    FROM api_keys_5;
DROP TABLE api_keys_5;
"""  # noqa: S608 (our text)
"""Roles and expiries of keys; suspension and deletion of tenants."""
_WEIGHTS = """
INSERT INTO tenant_limits SELECT tenant_id, 'weight', CAST(weight AS TEXT) FROM tenants WHERE weight != 1.0;
ALTER TABLE tenants DROP COLUMN weight;
"""
"""A weight is one of a tenant's limits."""
_LARGE_VALUES = f"""
DROP INDEX operations_unfinished;
DROP INDEX operations_finished;
DROP INDEX operations_fetched;
ALTER TABLE operations RENAME TO operations_6;
{OPERATIONS}
INSERT INTO operations SELECT target_id, seq, append_id, tenant_id, kind, request_id, payload_hash, num_bytes,
    chunk_tokens, batch_first_seq, batch_last_seq, length(outcome), is_failed, finished_service_s, fetched_service_s,
    engine_s FROM operations_6;
INSERT INTO payloads SELECT target_id, seq, payload FROM operations_6 WHERE payload IS NOT NULL;
INSERT INTO outcomes SELECT target_id, seq, outcome FROM operations_6 WHERE outcome != x'';
DROP TABLE operations_6;
"""  # noqa: S608 (our text)
"""Payloads and outcomes leave the operations' rows."""

MIGRATIONS = {
    5: _ACCOUNTS + AUDIT + TENANT_LIMITS + _WEIGHTS + PROBATIONS + USAGE_MONTHS,
    6: _LARGE_VALUES,
    7: RECORDS,
}
"""Schema version to the statements that make the next version of it."""
