"""The tables of the durable log, with the reason beside each constraint. Text only: `store` runs it.

Times named `_at` are of the wall clock, for people to read; what is decided by time is in service time (`_service_s`):
seconds that the service has run, in all its lives.
"""

SCHEMA_VERSION = 5

UNWRITTEN = "folder = '' AND samplers.body = x''"
"""Of an unnamed sampler whose weights are in no file so far. A checkpoint's folder says it alone."""

_INDEX_OF_SAMPLERS = """
CREATE INDEX samplers_unwritten ON samplers (adapter_id) WHERE folder = '' AND body = x'';"""
_INDEX_OF_CHECKPOINTS = """
CREATE INDEX checkpoints_unwritten ON checkpoints (adapter_id) WHERE folder = '';"""
_SNAPSHOTS_KEEP_THE_LOG = f"""
CREATE TRIGGER snapshots_keep_the_log     -- a snapshot cuts the log, and only the log can make such weights again
BEFORE INSERT ON snapshots
WHEN EXISTS (
    SELECT 1 FROM samplers JOIN sessions USING (session_id)
    WHERE samplers.adapter_id = NEW.adapter_id AND {UNWRITTEN} AND ended_at IS NULL
    AND CAST(substr(version, length(samplers.adapter_id) + 2) AS INTEGER) <= NEW.seq
) OR EXISTS (
    SELECT 1 FROM checkpoints WHERE adapter_id = NEW.adapter_id AND folder = '' AND seq <= NEW.seq
)
BEGIN SELECT RAISE(ABORT, 'weights saved there have no file yet'); END;
"""  # noqa: S608 (our names)

SCHEMA = (
    """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', 0), ('last_cycle_id', 0), ('service_ms', 0);
CREATE TABLE tenants (
    tenant_id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    weight REAL NOT NULL DEFAULT 1.0 CHECK (weight > 0),
    virtual_tokens REAL NOT NULL DEFAULT 0,
    created_at REAL NOT NULL
);
CREATE TABLE api_keys (
    key_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    secret_sha256 BLOB NOT NULL,          -- the secret itself is never stored
    is_admin INTEGER NOT NULL,
    created_at REAL NOT NULL,
    revoked_at REAL
);
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    request_id TEXT,
    user_metadata TEXT NOT NULL,
    created_at REAL NOT NULL,
    ended_at REAL,
    UNIQUE (tenant_id, request_id)        -- makes CreateSession safe to repeat
);
CREATE TABLE adapters (
    adapter_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL REFERENCES sessions,
    request_id TEXT,
    body BLOB NOT NULL,                   -- the canonical CreateAdapterRequest
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    alpha REAL NOT NULL,
    seed INTEGER NOT NULL,
    train_attn INTEGER NOT NULL,
    train_mlp INTEGER NOT NULL,
    train_unembed INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created_at REAL NOT NULL,
    deleted_at REAL,
    UNIQUE (session_id, request_id)
);
CREATE INDEX adapters_by_tenant ON adapters (tenant_id, created_at);
CREATE TABLE samplers (
    sampler_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL REFERENCES sessions,
    request_id TEXT,
    body BLOB NOT NULL,                   -- the canonical CreateSamplerRequest; empty for an unnamed save
    base_model TEXT NOT NULL,
    model_path TEXT NOT NULL,
    adapter_id TEXT NOT NULL,             -- whose weights; empty for the bare base model
    version TEXT NOT NULL,                -- names the weights, for workers that hold them already; empty: base model
    folder TEXT NOT NULL,                 -- its weights, below the data directory; empty: those of model_path, if any,
                                          -- or of an unnamed save whose file is still to come
    sha256 TEXT NOT NULL,
    created_at REAL NOT NULL,
    is_inflight INTEGER NOT NULL DEFAULT 0, -- samples from the newest such row of its adapter
    UNIQUE (session_id, request_id)
);
CREATE INDEX samplers_inflight ON samplers (adapter_id) WHERE is_inflight;
CREATE TABLE operations (
    target_id TEXT NOT NULL,              -- an adapter or a sampler
    seq INTEGER NOT NULL CHECK (seq >= 1),
    tenant_id TEXT NOT NULL REFERENCES tenants,
    kind TEXT NOT NULL,
    request_id TEXT,
    body BLOB,                            -- the canonical request; NULL once a snapshot covers it
    body_hash BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,
    chunk_tokens INTEGER NOT NULL,        -- canonical chunks are a function of the body and this
    outcome BLOB,                         -- the finished v1.Operation; NULL while unfinished, empty once dropped
    is_failed INTEGER NOT NULL DEFAULT 0,
    finished_service_s REAL,
    fetched_service_s REAL,               -- when its owner first had the result
    engine_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (target_id, seq),         -- exactly once: a seq exists once, whatever is sent
    UNIQUE (target_id, request_id)
) WITHOUT ROWID;
CREATE INDEX operations_unfinished ON operations (target_id, seq) WHERE outcome IS NULL;
CREATE INDEX operations_finished ON operations (finished_service_s) WHERE finished_service_s IS NOT NULL;
CREATE INDEX operations_fetched ON operations (fetched_service_s) WHERE fetched_service_s IS NOT NULL;
CREATE TABLE cycles (cycle_id INTEGER PRIMARY KEY, summary BLOB NOT NULL);
CREATE TABLE plans (                      -- cycles that were about to run: after a crash, who was in them
    cycle_id INTEGER NOT NULL,
    adapter_id TEXT NOT NULL,
    worker_id TEXT NOT NULL
);
CREATE TABLE snapshots (
    adapter_id TEXT PRIMARY KEY,          -- the newest one; the folder of the one before goes once this row is durable
    seq INTEGER NOT NULL,
    folder TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    window_error BLOB NOT NULL DEFAULT x'' -- the failure that has closed the gradient window; empty: it is open
);
CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    adapter_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    folder TEXT NOT NULL,                 -- below the data directory; empty: weights whose file is still to come
    size_bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    seq INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    user_metadata TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,                      -- as its owner is told; NULL: never
    expires_service_s REAL,               -- when it is deleted: a wall clock that jumps must not do that
    is_public INTEGER NOT NULL DEFAULT 0  -- whether every tenant may read it
);
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant_id, created_at);
CREATE INDEX checkpoints_by_adapter ON checkpoints (adapter_id, kind, created_at);
CREATE TABLE usage (
    tenant_id TEXT NOT NULL REFERENCES tenants,
    kind TEXT NOT NULL,
    num_operations INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    engine_s REAL NOT NULL,
    PRIMARY KEY (tenant_id, kind)
) WITHOUT ROWID;
"""
    + _INDEX_OF_SAMPLERS
    + _INDEX_OF_CHECKPOINTS
    + _SNAPSHOTS_KEEP_THE_LOG
)

MIGRATIONS = {
    1: """
INSERT INTO meta VALUES ('service_ms', 0);
DROP INDEX operations_finished;
ALTER TABLE operations RENAME COLUMN finished_at TO finished_service_s;
UPDATE operations SET finished_service_s = 0 WHERE finished_service_s IS NOT NULL;
ALTER TABLE operations ADD COLUMN fetched_service_s REAL;
CREATE INDEX operations_finished ON operations (finished_service_s) WHERE finished_service_s IS NOT NULL;
CREATE INDEX operations_fetched ON operations (fetched_service_s) WHERE fetched_service_s IS NOT NULL;
ALTER TABLE snapshots ADD COLUMN window_error BLOB NOT NULL DEFAULT x'';
ALTER TABLE checkpoints ADD COLUMN expires_service_s REAL;
UPDATE checkpoints SET expires_service_s = MAX(0, expires_at - CAST(strftime('%s', 'now') AS REAL));
""",
    2: """
ALTER TABLE checkpoints ADD COLUMN is_public INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samplers ADD COLUMN is_inflight INTEGER NOT NULL DEFAULT 0;
CREATE INDEX samplers_inflight ON samplers (adapter_id) WHERE is_inflight;
CREATE INDEX checkpoints_by_adapter ON checkpoints (adapter_id, kind, created_at);
""",
    3: _INDEX_OF_SAMPLERS,
    4: f"DROP TRIGGER IF EXISTS snapshots_keep_the_log;{_INDEX_OF_CHECKPOINTS}{_SNAPSHOTS_KEEP_THE_LOG}",
}
"""From each version to the next."""
