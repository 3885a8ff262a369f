-- JSON Schemas by subject and version, and which stream each is bound to.

-- A version is never changed. One that is deleted keeps its row without its text, so that its number is not used again.
CREATE TABLE schema_versions (
    tenant        TEXT NOT NULL,      -- namespace.tenant
    subject       TEXT NOT NULL,
    version       INTEGER NOT NULL,   -- from 1
    document      BLOB,               -- the JSON as it came; NULL once deleted
    created_at_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, subject, version)
) WITHOUT ROWID;

-- What the payloads of a stream must match. A row of an epoch that has ended means nothing.
CREATE TABLE schema_bindings (
    stream      TEXT PRIMARY KEY,
    epoch       INTEGER NOT NULL,
    tenant      TEXT NOT NULL,
    subject     TEXT NOT NULL,
    version     INTEGER NOT NULL,
    bound_at_us INTEGER NOT NULL
) WITHOUT ROWID;
