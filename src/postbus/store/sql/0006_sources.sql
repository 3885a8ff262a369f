-- Sources: what feeds the log from outside, and replies: what goes back out.

-- One row per source: what it is, how far it has read, how it fares.
CREATE TABLE source_registry (
    tenant         TEXT NOT NULL,
    source         TEXT NOT NULL,
    kind           TEXT NOT NULL,
    stream         TEXT NOT NULL,
    settings       BLOB NOT NULL,      -- JSON; secrets are named by their environment variables, never kept
    checkpoint     BLOB,               -- JSON; moves in the transaction that appends what was read
    last_error     TEXT,
    paused         INTEGER NOT NULL DEFAULT 0,
    failures       INTEGER NOT NULL DEFAULT 0,
    polls          INTEGER NOT NULL DEFAULT 0,
    events         INTEGER NOT NULL DEFAULT 0,
    duplicates     INTEGER NOT NULL DEFAULT 0,
    last_ok_at_us  INTEGER,
    next_due_at_us INTEGER,
    created_at_us  INTEGER NOT NULL,
    revision       INTEGER NOT NULL DEFAULT 0,
    turn           INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, source)
) WITHOUT ROWID;

-- Bodies that came in under a signature that does not cover their id: the same body again is a replay.
CREATE TABLE source_digests (
    tenant TEXT NOT NULL,
    source TEXT NOT NULL,
    digest BLOB NOT NULL,              -- SHA-256
    at_us  INTEGER NOT NULL,
    PRIMARY KEY (tenant, source, digest)
) WITHOUT ROWID;

-- Replies on their way out, in the order they were accepted.
CREATE TABLE outbox_rows (
    seq           INTEGER PRIMARY KEY,
    tenant        TEXT NOT NULL,
    delivery      TEXT NOT NULL UNIQUE,  -- also the idempotency key that is sent along
    stream        TEXT NOT NULL,         -- where the reply is recorded as an event
    partition     INTEGER NOT NULL,
    "offset"      INTEGER NOT NULL,
    handle        BLOB NOT NULL,
    lane          BLOB NOT NULL,         -- replies of one lane go out one after the other
    action        TEXT NOT NULL,
    arguments     BLOB NOT NULL,
    state         TEXT NOT NULL,         -- accepted | sent | failed
    attempts      INTEGER NOT NULL,
    deaths        INTEGER NOT NULL,
    due_at_us     INTEGER NOT NULL,
    error         TEXT,
    result        BLOB,                  -- JSON: what the far side answered
    created_at_us INTEGER NOT NULL,
    updated_at_us INTEGER NOT NULL
);
CREATE INDEX outbox_open ON outbox_rows (tenant, lane, seq) WHERE state = 'accepted';
CREATE INDEX outbox_by_tenant ON outbox_rows (tenant, seq);
CREATE INDEX outbox_by_event ON outbox_rows (stream, partition, "offset");

-- Every try, written down before it begins.
CREATE TABLE outbox_attempts (
    delivery      TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    started_at_us INTEGER NOT NULL,
    ended_at_us   INTEGER,
    error         TEXT,
    PRIMARY KEY (delivery, attempt, started_at_us)
) WITHOUT ROWID;

-- What an operator sees. `deliveries` is about events and their subscriptions; this is about replies.
CREATE VIEW sources AS
    SELECT tenant, source, kind, stream, CAST(settings AS TEXT) AS settings, CAST(checkpoint AS TEXT) AS checkpoint,
           CASE WHEN paused THEN 'paused' ELSE 'running' END AS state, last_error, failures, polls, events, duplicates,
           last_ok_at_us / 1e6 AS last_ok_at, next_due_at_us / 1e6 AS next_due_at, created_at_us / 1e6 AS created_at
    FROM source_registry;

CREATE VIEW reply_deliveries AS
    SELECT tenant, delivery, stream || '/' || partition || '/' || "offset" AS event, json_extract(CAST(handle AS TEXT), '$.kind') AS kind,
           CAST(handle AS TEXT) AS handle, action, CAST(arguments AS TEXT) AS arguments, state, attempts, error,
           CAST(result AS TEXT) AS result, due_at_us / 1e6 AS due_at, created_at_us / 1e6 AS created_at,
           updated_at_us / 1e6 AS updated_at
    FROM outbox_rows;
