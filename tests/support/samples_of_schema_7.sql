-- A data directory's database of schema version 7, as tinkerpool wrote it before log-probabilities of samples were scaled
-- by temperature: sample 1 of a sampler is finished, and sample 2, the same request, is not. Toy engines drew them.
PRAGMA application_id = 1953525612;
PRAGMA user_version = 7;
CREATE TABLE adapters (
    adapter_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL REFERENCES tenants,
    session_id TEXT NOT NULL REFERENCES sessions,
    request_id TEXT,
    payload BLOB NOT NULL,                -- the canonical CreateAdapterRequest
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
    UNIQUE (session_id, request_id)       -- makes CreateAdapter safe to repeat
);
CREATE TABLE api_keys (
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
INSERT INTO "api_keys" VALUES('a067d829c510','cc84ba8d8d7e0fab',X'C1E0DD08A147EA8D91B9D9AB45C2CCCA07C970222411FEB223A3007926B314DE','member',1700001000.0,NULL,NULL,NULL,0,'','');
CREATE TABLE audit (
    audit_id INTEGER PRIMARY KEY,         -- in the order of the acts
    at REAL NOT NULL,
    key_id TEXT NOT NULL,                 -- the acting key; empty: the pool itself, by the operator's command
    tenant TEXT NOT NULL,                 -- the acting key's tenant, by name: an entry outlives its tenant
    act TEXT NOT NULL,                    -- `key.create`, `tenant.delete`, ...
    subject TEXT NOT NULL,                -- the name of a tenant, the id of a key
    details TEXT NOT NULL                 -- a JSON object without secrets
);
INSERT INTO "audit" VALUES(1,1700001000.0,'','','tenant.create','alice','{}');
INSERT INTO "audit" VALUES(2,1700001000.0,'','','key.create','a067d829c510','{"role": "member", "tenant": "alice"}');
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
CREATE TABLE cycles (cycle_id INTEGER PRIMARY KEY, summary BLOB NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('epoch',1);
INSERT INTO "meta" VALUES('last_cycle_id',0);
INSERT INTO "meta" VALUES('pool_id',3091414601371329363);
INSERT INTO "meta" VALUES('service_ms',0);
CREATE TABLE operations (
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
INSERT INTO "operations" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0',1,4294967297,'cc84ba8d8d7e0fab','sample',NULL,X'C0C6F303FB1CD994A01BB2164A6182E1EF84A905F547D69EFC81C68FFAFC2D34',102,0,NULL,NULL,176,0,0.0,0.0,0.0);
INSERT INTO "operations" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0',2,4294967298,'cc84ba8d8d7e0fab','sample',NULL,X'C0C6F303FB1CD994A01BB2164A6182E1EF84A905F547D69EFC81C68FFAFC2D34',102,0,NULL,NULL,NULL,0,NULL,NULL,0.0);
CREATE TABLE outcomes (                   -- the finished v1.Operation; no row while undecided and once dropped
    target_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    outcome BLOB NOT NULL,
    PRIMARY KEY (target_id, seq),
    FOREIGN KEY (target_id, seq) REFERENCES operations ON DELETE CASCADE
);
INSERT INTO "outcomes" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0',1,X'0A2F65663262306635322D383036392D346139652D623835662D6466343266663166626266353A73616D706C653A303A3110071803222D65663262306635322D383036392D346139652D623835662D6466343266663166626266353A73616D706C653A30280138097A460A440A1F0A180300000035000000340000000B000000160000002700000010021A0106121F0A18000080BF000080BF000080BF000080BF000080BF000080BF10011A01061802');
CREATE TABLE payloads (                   -- the canonical request; no row once a snapshot covers it
    target_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (target_id, seq),
    FOREIGN KEY (target_id, seq) REFERENCES operations ON DELETE CASCADE
);
INSERT INTO "payloads" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0',2,X'0A2D65663262306635322D383036392D346139652D623835662D6466343266663166626266353A73616D706C653A3022130A0C01000000020000000300000010021A01032801321E0806150000003F18FFFFFFFFFFFFFFFFFF01250000803F28033203120100');
CREATE TABLE plans (                      -- read after a crash: the adapters of a cycle that did not commit
    cycle_id INTEGER NOT NULL,
    adapter_id TEXT NOT NULL,
    worker_id TEXT NOT NULL
);
CREATE TABLE probations (
    tenant_id TEXT PRIMARY KEY REFERENCES tenants ON DELETE CASCADE,
    num_kills INTEGER NOT NULL CHECK (num_kills >= 1),
    killed_service_s REAL NOT NULL,       -- the last kill; the number of kills halves some time after it
    until_service_s REAL NOT NULL,        -- nothing of the tenant runs before it
    operation TEXT NOT NULL               -- the name of the operation of the last kill
) WITHOUT ROWID;
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
    UNIQUE (session_id, request_id)       -- makes CreateSampler safe to repeat
);
INSERT INTO "samplers" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0','cc84ba8d8d7e0fab','ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5',NULL,X'0A2465663262306635322D383036392D346139652D623835662D6466343266663166626266351A03746F79','toy','','','','','',1700001000.0,0);
CREATE TABLE sessions (
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
INSERT INTO "sessions" VALUES('ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5','cc84ba8d8d7e0fab','431a31322d81424a9b9ff96a159950bc','{}',1700001000.0,NULL,NULL,0);
CREATE TABLE snapshots (
    adapter_id TEXT PRIMARY KEY,          -- the replaced folder is deleted once this row is durable
    seq INTEGER NOT NULL,                 -- covers all operations up to here
    folder TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    window BLOB NOT NULL DEFAULT x''      -- JSON: the gradient window's failure and batch; empty: none of them
);
CREATE TABLE tenant_limits (
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL,                  -- as people type it, see coordinator.base.tenant_limits
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant_id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    virtual_tokens REAL NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    suspended_at REAL,                    -- its calls are refused; NULL: it is not suspended
    suspension_reason TEXT NOT NULL DEFAULT '', -- as told to its users
    deletion_at REAL                      -- everything of it is being deleted, at last this row; NULL: it stays
);
INSERT INTO "tenants" VALUES('cc84ba8d8d7e0fab','alice',0.0,1700001000.0,NULL,'',NULL);
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
INSERT INTO "usage" VALUES('cc84ba8d8d7e0fab','sample',1,9,0.0,0,0.0);
CREATE TABLE usage_months (
    tenant_id TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE,
    month INTEGER NOT NULL,               -- of the calendar, UTC: 202611
    num_tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, month)
) WITHOUT ROWID;
INSERT INTO "usage_months" VALUES('cc84ba8d8d7e0fab',202311,9);
CREATE INDEX adapters_by_tenant ON adapters (tenant_id, created_at);
CREATE INDEX samplers_by_adapter ON samplers (adapter_id) WHERE adapter_id != '';
CREATE INDEX samplers_inflight ON samplers (adapter_id) WHERE is_inflight;
CREATE INDEX samplers_unwritten ON samplers (adapter_id) WHERE folder = '' AND payload = x'';
CREATE INDEX operations_unfinished ON operations (target_id, seq) WHERE outcome_bytes IS NULL;
CREATE INDEX operations_finished ON operations (finished_service_s) WHERE finished_service_s IS NOT NULL;
CREATE INDEX operations_fetched ON operations (fetched_service_s) WHERE fetched_service_s IS NOT NULL;
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant_id, created_at);
CREATE INDEX checkpoints_by_adapter ON checkpoints (adapter_id, kind, created_at);
CREATE INDEX checkpoints_unwritten ON checkpoints (adapter_id) WHERE folder = '';
CREATE TRIGGER snapshots_keep_the_log     -- a snapshot cuts the log, which such weights are rematerialized from
BEFORE INSERT ON snapshots
WHEN EXISTS (
    SELECT 1 FROM samplers JOIN sessions USING (session_id)
    WHERE samplers.adapter_id = NEW.adapter_id AND folder = '' AND samplers.payload = x'' AND ended_at IS NULL
    AND CAST(substr(version, length(samplers.adapter_id) + 2) AS INTEGER) <= NEW.seq
) OR EXISTS (
    SELECT 1 FROM checkpoints WHERE adapter_id = NEW.adapter_id AND folder = '' AND seq <= NEW.seq
)
BEGIN SELECT RAISE(ABORT, 'weights saved there have no file yet'); END;
CREATE TRIGGER audit_keeps_its_entries BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_changes_no_entry BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_replaces_no_entry    -- INSERT OR REPLACE deletes a row without the trigger of a DELETE
BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE audit_id = NEW.audit_id)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
