-- The service: who may call it, and how much each tenant may use.

-- API keys. Only a hash of the secret is kept; a revoked key keeps its row so that its name stays explained.
CREATE TABLE api_keys (
    key_id        TEXT PRIMARY KEY,
    secret_hash   BLOB NOT NULL,      -- SHA-256 of 128 random bits, so no salt is needed
    tenant        TEXT,               -- namespace.tenant; NULL: the operator, who may use any tenant
    name          TEXT NOT NULL,
    grants        TEXT NOT NULL,      -- JSON: [{"scope", "pattern"}]
    source        TEXT,               -- what it publishes as, when it is bound to one
    trusted       INTEGER NOT NULL,   -- whether what it publishes is marked as trusted
    created_at_us INTEGER NOT NULL,
    expires_at_us INTEGER,
    revoked_at_us INTEGER
) WITHOUT ROWID;

-- What a tenant may use, as JSON; the row of tenant '*' holds for everybody without a row.
CREATE TABLE tenant_quotas (
    tenant TEXT PRIMARY KEY,
    quota  TEXT NOT NULL
) WITHOUT ROWID;
