"""The changes from each older format of the database that this version still reads to the next one.

Text only: `database` runs it, in one transaction with the new version's number. Main invariant: a migrated database has
the same columns, indexes and triggers as a new one.
"""

from coordinator.storage.schema import (
    API_KEYS,
    AUDIT,
    BASE_MODELS,
    DRAINED_WORKERS,
    HISTORY,
    KEYS_LISTED,
    LISTED,
    NAMED,
    NEWEST,
    OPERATIONS,
    PROBATIONS,
    RECORDS,
    ROW_BYTES,
    ROW_COUNTS,
    TENANT_LIMITS,
    USAGE_DAYS,
    USAGE_MONTHS,
    WORKER_CLASSES,
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

_ROW_BYTES = f"""
ALTER TABLE tenants ADD COLUMN row_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samplers ADD COLUMN file_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE tenants SET row_bytes = found.num_bytes FROM (
    SELECT tenant_id, SUM(num_bytes) AS num_bytes FROM (
        SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) AS num_bytes FROM sessions
        UNION ALL SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) + length(payload) FROM adapters
        UNION ALL SELECT tenant_id, {ROW_BYTES} + length(CAST(user_metadata AS BLOB)) FROM checkpoints
        UNION ALL SELECT tenant_id, {ROW_BYTES} + length(payload) FROM samplers
        UNION ALL SELECT tenant_id, {ROW_BYTES} + COALESCE(outcome_bytes, 0) FROM operations
        UNION ALL SELECT tenant_id, num_bytes FROM operations JOIN payloads USING (target_id, seq)
    ) GROUP BY tenant_id
) AS found WHERE found.tenant_id = tenants.tenant_id;
{ROW_COUNTS}{LISTED}"""  # noqa: S608 (our text)
"""What a tenant's rows have counts among its stored bytes. Files of samplers that were saved before count nothing."""

_NAMES = f"""
ALTER TABLE adapters ADD COLUMN name TEXT NOT NULL DEFAULT '';
ALTER TABLE adapters ADD COLUMN used_at REAL NOT NULL DEFAULT 0;
UPDATE adapters SET used_at = CAST(strftime('%s', 'now') AS REAL);
DROP INDEX IF EXISTS adapters_listed;
{NAMED}"""  # noqa: S608 (our text)
"""Names of adapters. When they were last used is not known: none counts as idle for longer than since the migration."""
_USAGE_DAYS = f"""
ALTER TABLE tenants ADD COLUMN usage_adapter_rows INTEGER NOT NULL DEFAULT 0;
{USAGE_DAYS}
INSERT INTO usage_days SELECT tenant_id, 0, '', '*', kind, num_operations, num_tokens, engine_s, file_bytes, file_s
    FROM usage;
INSERT INTO meta VALUES ('usage_day', CAST(strftime('%Y%m%d', 'now') AS INTEGER));
"""  # noqa: S608 (our text)
"""What was used before counts for no day. The first day is that of the migration: SQLite's clock is the machine's."""

MIGRATIONS = {
    5: _ACCOUNTS + AUDIT + TENANT_LIMITS + _WEIGHTS + PROBATIONS + USAGE_MONTHS,
    6: _LARGE_VALUES,
    7: RECORDS + _ROW_BYTES,
    8: DRAINED_WORKERS + WORKER_CLASSES + "ALTER TABLE adapters ADD COLUMN fingerprint TEXT NOT NULL DEFAULT '';",
    9: "ALTER TABLE tenants ADD COLUMN history_rows INTEGER NOT NULL DEFAULT 0;\n" + HISTORY,
    10: _NAMES,
    11: _USAGE_DAYS,
    12: "DROP INDEX checkpoints_by_adapter;\n" + NEWEST,
    13: BASE_MODELS,
    14: KEYS_LISTED,
}
"""Schema version to the statements that make the next version of it."""
