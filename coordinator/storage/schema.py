"""The format of the database, with the reason for each constraint. Text only: `database` runs it.

Times named `_at` are of the wall clock, for people to read; decisions by time use service time (`_service_s`): the
seconds that the service has run, in all incarnations of the coordinator. A request is stored as its payload, its
canonical serialization; outcomes and errors are serialized messages of the contract `tinkerpool.v1`.

| table | one row for | written when |
|---|---|---|
| meta | a number: `pool_id`, `epoch`, `last_cycle_id`, `service_ms`, `usage_day` | the pool starts; a cycle commits |
| tenants | a tenant with its fair-share counter, the bytes of its rows | it or a row of it changes; its cycle commits |
| tenant_limits | a limit of a tenant that is not the pool's default | an administrator sets it |
| api_keys | an API key, as the hash of its secret | it is created, rotated or revoked; when it was used, once an hour |
| audit | an act of an administrator | in the transaction of the act; never changed or deleted |
| sessions | a client process | it is created or ends; deleted once nothing needs it |
| adapters | an adapter: its spec, not its state | it is created, renamed, used (once an hour), deleted; gone later |
| samplers | a sampler | it is created, or weights are saved without a name; deleted after its session |
| operations | an operation, without its payload and outcome | it is appended, decided, fetched; deleted later |
| payloads | the payload of an operation that a recovery may need | it is appended; deleted once a snapshot covers it |
| outcomes | the outcome of a decided operation | it is decided; deleted some time after it was fetched |
| sample_records | a recorded sample | with its outcome; a pass uses it; deleted a day later, or with its session |
| sequence_records | a sequence of such a sample | the same |
| history | a finished operation, with its waits and metrics, or a user's metrics | it is decided; deleted later |
| cycles | one of the last cycles, as a serialized v1.Cycle | it commits |
| plans | an adapter in a planned cycle | with the write after the plan; the cycle's commit deletes it |
| snapshots | an adapter's newest snapshot | its folder is durable |
| checkpoints | a checkpoint | its save commits; it is overwritten or deleted |
| probations | a tenant whose operations killed workers | with the write after a kill, or after what it cost is known |
| drained_workers | a worker that an administrator has drained | it is drained or undrained; a start without it |
| worker_classes | a worker that has ever been ready | it reports another fingerprint |
| base_models | a base model whose weights are known | its first worker starts; others while nothing needs it |
| usage_days | the usage of a tenant's adapter on a day, by kind | with `usage`; merged with others later |
| used_days | a day that is kept apart there | with the day's first row; deleted once its rows are merged |
| usage_months | the tokens of a tenant in a calendar month | an operation finishes |
| usage | the usage of a tenant's operations of one kind, or uses of files | one finishes; an export: later |

Folders (see `folders`) are named below `checkpoints/`, `snapshots/` and `samplers/` of the data directory.
"""

APPLICATION_ID = 0x74706F6C
"""`tpol`, in the header of the file: a database of this format and its successors."""
SCHEMA_VERSION = 15

UNWRITTEN = "folder = '' AND samplers.payload = x''"
"""Condition for unnamed samplers whose weights have no file so far. For a checkpoint an empty folder is enough."""

API_KEYS = """CREATE TABLE api_keys (
    key_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    secret_sha256 BLOB NOT NULL,          -- the secret itself is never stored
    role TEXT NOT NULL CHECK (role IN ('read-only', 'member', 'admin')),
    created_at REAL NOT NULL,
    expires_at REAL,                      -- a time of day, downtime counts; NULL: never
    revoked_at REAL,
    last_used_at REAL,                    -- up to an hour late; NULL: never
    is_local INTEGER NOT NULL DEFAULT 0,  -- an administrator's for callers on the pool's machine only
    certificate_sha256 TEXT NOT NULL DEFAULT '', -- of the client's certificate that it needs; empty: none
    successor TEXT NOT NULL DEFAULT ''    -- the key that replaced it; empty: none
);
"""
"""The API keys, also for databases whose older table a migration replaces."""

AUDIT = """
CREATE TABLE audit (
    audit_id INTEGER PRIMARY KEY,         -- in the order of the acts
    at REAL NOT NULL,
    key_id TEXT NOT NULL,                 -- the acting key; empty: the pool itself, by the operator's command
    tenant TEXT NOT NULL,                 -- the acting key's tenant, by name: an entry outlives its tenant
    act TEXT NOT NULL,                    -- `key.create`, `tenant.delete`, ...
    subject TEXT NOT NULL,                -- the name of a tenant, the id of a key
    details TEXT NOT NULL                 -- a JSON object without secrets
);
CREATE TRIGGER audit_keeps_its_entries BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_changes_no_entry BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_replaces_no_entry    -- INSERT OR REPLACE deletes a row without the trigger of a DELETE
BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE audit_id = NEW.audit_id)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
"""
"""The audit log, also for databases that a migration gives one."""

USAGE_MONTHS = """
CREATE TABLE usage_months (
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    month INTEGER NOT NULL,               -- of the calendar, UTC: 202611
    num_tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, month)
) WITHOUT ROWID;
"""
"""What budgets count, also for databases that a migration gives it: months before it are not counted."""

USAGE_DAYS = """
CREATE TABLE usage_days (
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    day INTEGER NOT NULL,                 -- of the calendar, UTC: 20261126; 0: days that are not kept apart
    base_model TEXT NOT NULL,             -- empty: of before this table
    adapter_id TEXT NOT NULL,             -- it may be gone; empty: the bare base model; '*': several
    kind TEXT NOT NULL,
    num_operations INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    engine_s REAL NOT NULL,
    file_bytes INTEGER NOT NULL,
    file_s REAL NOT NULL,
    PRIMARY KEY (tenant_id, day, base_model, adapter_id, kind)
) WITHOUT ROWID;
CREATE TABLE used_days (day INTEGER PRIMARY KEY);
CREATE TRIGGER usage_days_note_day AFTER INSERT ON usage_days WHEN NEW.day != 0
BEGIN INSERT INTO used_days SELECT NEW.day WHERE NOT EXISTS (SELECT 1 FROM used_days WHERE day = NEW.day); END;
CREATE TRIGGER usage_days_count_insert AFTER INSERT ON usage_days WHEN NEW.adapter_id NOT IN ('', '*')
BEGIN UPDATE tenants SET usage_adapter_rows = usage_adapter_rows + 1 WHERE tenant_id = NEW.tenant_id; END;
CREATE TRIGGER usage_days_count_delete AFTER DELETE ON usage_days WHEN OLD.adapter_id NOT IN ('', '*')
BEGIN UPDATE tenants SET usage_adapter_rows = usage_adapter_rows - 1 WHERE tenant_id = OLD.tenant_id; END;
"""
"""The usage by day, also for databases that a migration gives it. A tenant's rows add up to those of `usage`."""

TENANT_LIMITS = """
CREATE TABLE tenant_limits (
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL,                  -- as people type it, see coordinator.base.tenant_limits
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;
"""
"""The limits that administrators set, also for databases that a migration gives them."""

PROBATIONS = """
CREATE TABLE probations (
    tenant_id TEXT PRIMARY KEY REFERENCES tenants ON DELETE CASCADE,
    num_kills INTEGER NOT NULL CHECK (num_kills >= 1),
    killed_service_s REAL NOT NULL,       -- the last kill; the number of kills halves some time after it
    until_service_s REAL NOT NULL,        -- nothing of the tenant runs before it
    operation TEXT NOT NULL               -- the name of the operation of the last kill
) WITHOUT ROWID;
"""
"""The tenants whose operations killed workers, also for databases that a migration gives the table."""

DRAINED_WORKERS = """
CREATE TABLE drained_workers (
    worker_id TEXT PRIMARY KEY,
    base_model TEXT NOT NULL              -- another one has another worker with this id
) WITHOUT ROWID;
"""
"""The workers that are not started, also for databases that a migration gives the table."""

WORKER_CLASSES = """
CREATE TABLE worker_classes (
    worker_id TEXT PRIMARY KEY,
    base_model TEXT NOT NULL,             -- another one has another worker with this id
    fingerprint TEXT NOT NULL             -- of the numerics that it reported last
) WITHOUT ROWID;
"""
"""The classes of workers, also for databases that a migration gives the table."""

BASE_MODELS = """
CREATE TABLE base_models (
    name TEXT PRIMARY KEY,
    weights_id TEXT NOT NULL              -- what its workers must have as long as anything was trained on it
) WITHOUT ROWID;
"""
"""Which weights a name stands for, also for databases that a migration gives the table."""

ROW_BYTES = 200
"""What the columns of a row count that are no long texts or blobs of a client: numbers, ids, names, keys of indexes."""


def _counting(table: str, row_bytes: str, num_rows: str = "") -> str:
    """Return triggers that count what a table's rows have; `row_bytes` is the size of the row `R`.

    `num_rows`: the column of tenants with the number of their rows; empty: none has it.
    """
    return "".join(
        f"""CREATE TRIGGER {table}_count_{event} AFTER {event.upper()} ON {table}
BEGIN UPDATE tenants SET row_bytes = row_bytes {sign} ({row_bytes.replace("R.", f"{row}.")}){
            f", {num_rows} = {num_rows} {sign} 1" if num_rows else ""
        }
    WHERE tenant_id = {row}.tenant_id; END;
"""  # noqa: S608 (our names)
        for event, row, sign in (("insert", "NEW", "+"), ("delete", "OLD", "-"))
    )


_TEXT_BYTES = "length(CAST({} AS BLOB))"
_METADATA = f"{ROW_BYTES} + {_TEXT_BYTES.format('R.user_metadata')}"
_OPERATION_COUNTS = f"""CREATE TRIGGER samplers_count_files AFTER UPDATE OF file_bytes ON samplers
BEGIN UPDATE tenants SET row_bytes = row_bytes + NEW.file_bytes - OLD.file_bytes
    WHERE tenant_id = NEW.tenant_id; END;
CREATE TRIGGER operations_count_insert AFTER INSERT ON operations   -- with its payload
BEGIN UPDATE tenants SET row_bytes = row_bytes + {ROW_BYTES} + NEW.num_bytes + COALESCE(NEW.outcome_bytes, 0)
    WHERE tenant_id = NEW.tenant_id; END;
CREATE TRIGGER operations_count_outcome AFTER UPDATE OF outcome_bytes ON operations
BEGIN UPDATE tenants SET row_bytes = row_bytes + COALESCE(NEW.outcome_bytes, 0) - COALESCE(OLD.outcome_bytes, 0)
    WHERE tenant_id = NEW.tenant_id; END;
CREATE TRIGGER payloads_count_delete AFTER DELETE ON payloads
BEGIN UPDATE tenants SET row_bytes = row_bytes - operations.num_bytes FROM operations
    WHERE operations.target_id = OLD.target_id AND operations.seq = OLD.seq
    AND tenants.tenant_id = operations.tenant_id; END;
CREATE TRIGGER operations_count_delete BEFORE DELETE ON operations  -- before its payload is deleted with it
BEGIN UPDATE tenants SET row_bytes = row_bytes - {ROW_BYTES} - COALESCE(OLD.outcome_bytes, 0) - (
    SELECT COALESCE(SUM(OLD.num_bytes), 0) FROM payloads WHERE target_id = OLD.target_id AND seq = OLD.seq)
    WHERE tenant_id = OLD.tenant_id; END;
"""  # noqa: S608 (our names)
ROW_COUNTS = (
    _counting("sessions", _METADATA)
    + _counting("adapters", f"{_METADATA} + length(R.payload)")
    + _counting("checkpoints", _METADATA)
    + _counting("samplers", f"{ROW_BYTES} + length(R.payload) + R.file_bytes")
    + _counting("sample_records", "R.num_bytes")
    + _OPERATION_COUNTS
)
"""Keep `tenants.row_bytes`: what all rows of a tenant have, also for databases that a migration gives the triggers."""

LISTED = """
CREATE INDEX sessions_listed ON sessions (tenant_id, created_at DESC, session_id) WHERE ended_at IS NULL;
"""
"""List without reading rows, whose metadata may be large; also for databases that a migration gives the index."""

KEYS_LISTED = """CREATE INDEX api_keys_listed ON api_keys (created_at DESC, key_id);
"""
"""List the keys of all tenants without sorting them, also for databases that a migration gives the index."""

NAMED = """
CREATE INDEX adapters_listed ON adapters (tenant_id, created_at DESC, adapter_id, name, deleted_at)
    WHERE deleted_at IS NULL;
CREATE INDEX adapters_named ON adapters (tenant_id, name) WHERE name != '';
"""
"""List and find adapters without reading rows, as `LISTED`; the second index has deleted adapters, too."""

NEWEST = """CREATE INDEX checkpoints_by_adapter ON checkpoints (adapter_id, kind, seq);
"""
"""Find the newest of an adapter's checkpoints: the order of the saves, which steps of the wall clock do not change."""

OPERATIONS = """CREATE TABLE operations (
    target_id TEXT NOT NULL,              -- an adapter or a sampler
    seq INTEGER NOT NULL CHECK (seq >= 1),
    append_id INTEGER NOT NULL,           -- epoch << 32 | counter: an outcome is stored only for its own append
    tenant_id TEXT NOT NULL REFERENCES tenants,
    kind TEXT NOT NULL,
    request_id TEXT,
    payload_hash BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,           -- of the payload
    chunk_tokens INTEGER NOT NULL,        -- canonical chunks are a function of the payload and this
    batch_first_seq INTEGER,              -- the batch that a forward_backward is part of: a failed one closes
    batch_last_seq INTEGER,               -- the gradient window up to here; NULL: it is not marked
    outcome_bytes INTEGER,                -- size of the outcome; NULL while undecided, 0 once it was dropped
    is_failed INTEGER NOT NULL DEFAULT 0,
    finished_service_s REAL,
    fetched_service_s REAL,               -- when its owner first fetched the result
    engine_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (target_id, seq),         -- exactly once: a seq exists once, whatever is sent
    UNIQUE (target_id, request_id)
) WITHOUT ROWID;
CREATE INDEX operations_unfinished ON operations (target_id, seq) WHERE outcome_bytes IS NULL;
CREATE INDEX operations_finished ON operations (finished_service_s) WHERE finished_service_s IS NOT NULL;
CREATE INDEX operations_fetched ON operations (fetched_service_s) WHERE fetched_service_s IS NOT NULL;
CREATE TABLE payloads (                   -- the canonical request; no row once a snapshot covers it
    target_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (target_id, seq),
    FOREIGN KEY (target_id, seq) REFERENCES operations ON DELETE CASCADE
);
CREATE TABLE outcomes (                   -- the finished v1.Operation; no row while undecided and once dropped
    target_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    outcome BLOB NOT NULL,
    PRIMARY KEY (target_id, seq),
    FOREIGN KEY (target_id, seq) REFERENCES operations ON DELETE CASCADE
);
"""
"""The operation log, also for databases whose older table a migration replaces.

Payloads and outcomes may have megabytes. They are in tables of their own, with a rowid: SQLite rewrites a whole row for
each change of it, and in a table without rowid reads whole rows to find a key.
"""

RECORDS = """CREATE TABLE sample_records (
    target_id TEXT NOT NULL,              -- a sampler
    seq INTEGER NOT NULL,                 -- of the sample, whose own rows may be gone
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL,             -- of the sampler; its end drops the record, and no other use needs it
    temperature REAL NOT NULL CHECK (temperature > 0), -- of the log-probabilities
    logprobs_version INTEGER NOT NULL,    -- what they mean
    sampler_version TEXT NOT NULL,
    num_prompt_tokens INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,           -- counted as stored bytes of the tenant
    used_service_s REAL NOT NULL,         -- when it was made or last used: it is deleted a day later
    PRIMARY KEY (target_id, seq)
) WITHOUT ROWID;
CREATE INDEX sample_records_by_use ON sample_records (used_service_s);
CREATE INDEX sample_records_by_session ON sample_records (session_id);
CREATE INDEX sample_records_by_tenant ON sample_records (tenant_id);
CREATE TABLE sequence_records (           -- apart: a use rewrites the row above
    target_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    sequence_index INTEGER NOT NULL,
    tokens BLOB NOT NULL,                 -- int32
    logprobs BLOB NOT NULL,               -- float32, as many
    PRIMARY KEY (target_id, seq, sequence_index),
    FOREIGN KEY (target_id, seq) REFERENCES sample_records ON DELETE CASCADE
);
"""
"""The records of sampled sequences, also for databases that a migration gives them."""

HISTORY = f"""CREATE TABLE history (
    entry_id INTEGER PRIMARY KEY AUTOINCREMENT, -- in the order of the commits; none is used twice: it is a page token
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    target_id TEXT NOT NULL,              -- an adapter or a sampler, which may be gone
    seq INTEGER NOT NULL,                 -- of the operation; 0: metrics that a user reported
    at_service_s REAL NOT NULL,
    entry BLOB NOT NULL                   -- a v1.HistoryEntry
);
CREATE INDEX history_by_target ON history (target_id, seq);
CREATE INDEX history_by_tenant ON history (tenant_id, entry_id);
{_counting("history", f"{ROW_BYTES} + length(R.entry)", "history_rows")}"""
"""What became of operations, also for databases that a migration gives it: entries begin with it."""

SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', 0), ('last_cycle_id', 0), ('service_ms', 0), ('usage_day', 0);
CREATE TABLE tenants (
    tenant_id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    virtual_tokens REAL NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    suspended_at REAL,                    -- its calls are refused; NULL: it is not suspended
    suspension_reason TEXT NOT NULL DEFAULT '', -- as told to its users
    deletion_at REAL,                     -- everything of it is being deleted, at last this row; NULL: it stays
    row_bytes INTEGER NOT NULL DEFAULT 0, -- of its rows: metadata, requests, results, records; and of samplers' files
    history_rows INTEGER NOT NULL DEFAULT 0,
    usage_adapter_rows INTEGER NOT NULL DEFAULT 0 -- of its rows in usage_days, those that name an adapter
);
{API_KEYS}CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    request_id TEXT,
    user_metadata TEXT NOT NULL,          -- a JSON object
    created_at REAL NOT NULL,
    ended_at REAL,                        -- NULL: it is live
    ended_service_s REAL,                 -- its row is deleted some time after it
    adapters_gone INTEGER NOT NULL DEFAULT 0, -- a number below this without a row may have had an adapter
    UNIQUE (tenant_id, request_id)        -- makes CreateSession safe to repeat
);
CREATE TABLE adapters (
    adapter_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL REFERENCES sessions,
    request_id TEXT,
    payload BLOB NOT NULL,                -- the canonical CreateAdapterRequest or ImportCheckpointRequest
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    alpha REAL NOT NULL,
    seed INTEGER NOT NULL,
    train_attn INTEGER NOT NULL,
    train_mlp INTEGER NOT NULL,
    train_unembed INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,          -- a JSON object
    created_at REAL NOT NULL,
    deleted_at REAL,                      -- NULL: it has training state
    deleted_service_s REAL,               -- its row is deleted some time after it
    is_restored INTEGER NOT NULL DEFAULT 0, -- its log may lack operations that its client has acknowledged
    fingerprint TEXT NOT NULL DEFAULT '', -- of the numerics that ran its operations last; empty: none ran
    name TEXT NOT NULL DEFAULT '',        -- what people call it, not unique; empty: nothing
    used_at REAL NOT NULL DEFAULT 0,      -- its creation or last accepted operation; up to an hour early
    UNIQUE (session_id, request_id)       -- makes CreateAdapter safe to repeat
);
CREATE INDEX adapters_by_tenant ON adapters (tenant_id, created_at);
CREATE TABLE samplers (
    sampler_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL REFERENCES sessions,
    request_id TEXT,
    payload BLOB NOT NULL,                -- the canonical CreateSamplerRequest; empty for an unnamed save
    base_model TEXT NOT NULL,
    model_path TEXT NOT NULL,             -- the checkpoint whose weights it has; empty: none
    adapter_id TEXT NOT NULL,             -- the adapter of its weights; empty: the bare base model
    version TEXT NOT NULL,                -- names the weights, for workers that hold them; empty: the bare base model
    folder TEXT NOT NULL,                 -- the weights of an unnamed save; empty: no file so far, or another sampler
    sha256 TEXT NOT NULL,
    created_at REAL NOT NULL,
    is_inflight INTEGER NOT NULL DEFAULT 0, -- samples from the newest such row of its adapter
    file_bytes INTEGER NOT NULL DEFAULT 0, -- of the weights of an unnamed save; 0 once its session has ended
    UNIQUE (session_id, request_id)       -- makes CreateSampler safe to repeat
);
CREATE INDEX samplers_by_adapter ON samplers (adapter_id) WHERE adapter_id != '';
CREATE INDEX samplers_inflight ON samplers (adapter_id) WHERE is_inflight;
CREATE INDEX samplers_unwritten ON samplers (adapter_id) WHERE folder = '' AND payload = x'';
{OPERATIONS}CREATE TABLE cycles (cycle_id INTEGER PRIMARY KEY, summary BLOB NOT NULL);
CREATE TABLE plans (                      -- read after a crash: the adapters of a cycle that did not commit
    cycle_id INTEGER NOT NULL,
    adapter_id TEXT NOT NULL,
    worker_id TEXT NOT NULL
);
CREATE TABLE snapshots (
    adapter_id TEXT PRIMARY KEY,          -- the replaced folder is deleted once this row is durable
    seq INTEGER NOT NULL,                 -- covers all operations up to here
    folder TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    window BLOB NOT NULL DEFAULT x''      -- JSON: the gradient window's failure and batch; empty: none of them
);
CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    adapter_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    folder TEXT NOT NULL,                 -- empty: weights for sampling without a file so far
    size_bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    seq INTEGER NOT NULL,                 -- of the save
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    user_metadata TEXT NOT NULL,          -- a JSON object
    created_at REAL NOT NULL,
    expires_at REAL,                      -- as shown to its owner; NULL: never
    expires_service_s REAL,               -- when it is deleted: a step of the wall clock must not do that
    is_public INTEGER NOT NULL DEFAULT 0  -- whether every tenant may read it
);
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant_id, created_at);
{NEWEST}CREATE INDEX checkpoints_unwritten ON checkpoints (adapter_id) WHERE folder = '';
CREATE TABLE usage (
    tenant_id TEXT NOT NULL REFERENCES tenants,
    kind TEXT NOT NULL,
    num_operations INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    engine_s REAL NOT NULL,
    file_bytes INTEGER NOT NULL DEFAULT 0, -- of states that were read, written or sent
    file_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, kind)
) WITHOUT ROWID;
CREATE TRIGGER snapshots_keep_the_log     -- a snapshot cuts the log, which such weights are rematerialized from
BEFORE INSERT ON snapshots
WHEN EXISTS (
    SELECT 1 FROM samplers JOIN sessions USING (session_id)
    WHERE samplers.adapter_id = NEW.adapter_id AND {UNWRITTEN} AND ended_at IS NULL
    AND CAST(substr(version, length(samplers.adapter_id) + 2) AS INTEGER) <= NEW.seq
) OR EXISTS (
    SELECT 1 FROM checkpoints WHERE adapter_id = NEW.adapter_id AND folder = '' AND seq <= NEW.seq
)
BEGIN SELECT RAISE(ABORT, 'weights saved there have no file yet'); END;
{AUDIT}{TENANT_LIMITS}{USAGE_MONTHS}{USAGE_DAYS}{PROBATIONS}{DRAINED_WORKERS}{WORKER_CLASSES}{BASE_MODELS}{RECORDS}{HISTORY}{ROW_COUNTS}{LISTED}
{NAMED}{KEYS_LISTED}"""  # noqa: S608 (our names)
