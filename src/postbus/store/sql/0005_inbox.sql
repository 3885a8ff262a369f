-- Inboxes: agents, what they are owed, and how bursts are put together. An item points at its event, it is no copy.

-- One row per agent, also after it was removed: its number is never given out again.
CREATE TABLE agent_registry (
    agent_no      INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant        TEXT NOT NULL,
    agent         TEXT NOT NULL,
    settings      TEXT NOT NULL,
    last_sequence INTEGER NOT NULL DEFAULT 0,  -- of the newest item there ever was
    acked_floor   INTEGER NOT NULL DEFAULT 0,  -- everything up to here is acked
    created_at_us INTEGER NOT NULL,
    removed_at_us INTEGER
);
CREATE UNIQUE INDEX agent_registry_names ON agent_registry (tenant, agent) WHERE removed_at_us IS NULL;

-- One event owed to one agent, in the order it was materialised; at most once, however many subscriptions match it.
CREATE TABLE inbox_rows (
    agent_no        INTEGER NOT NULL,
    sequence        INTEGER NOT NULL,
    stream_id       INTEGER NOT NULL,
    partition       INTEGER NOT NULL,
    "offset"        INTEGER NOT NULL,
    matched_by      TEXT NOT NULL,     -- JSON list of subscriptions
    reason          TEXT NOT NULL,
    entry           INTEGER,           -- the digest it belongs to: the sequence of that digest's first item
    created_at_us   INTEGER NOT NULL,  -- accepted
    delivered_at_us INTEGER,           -- first announced or handed out
    read_at_us      INTEGER,
    acked_at_us     INTEGER,
    PRIMARY KEY (agent_no, sequence)
) WITHOUT ROWID;
CREATE UNIQUE INDEX inbox_rows_by_event ON inbox_rows (stream_id, partition, "offset", agent_no);
CREATE INDEX inbox_rows_acked ON inbox_rows (acked_at_us) WHERE acked_at_us IS NOT NULL;

-- Items that were acked and removed: a reset never brings them back.
CREATE TABLE inbox_seen (
    stream_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL,
    agent_no  INTEGER NOT NULL,
    sequence  INTEGER NOT NULL,
    PRIMARY KEY (stream_id, partition, "offset", agent_no)
) WITHOUT ROWID;

-- A digest: the items of a burst on one resource. What came since the last revision waits to be shown as the next one.
CREATE TABLE inbox_digests (
    agent_no     INTEGER NOT NULL,
    entry        INTEGER NOT NULL,
    resource     TEXT NOT NULL,
    window_us    INTEGER NOT NULL,
    items_max    INTEGER NOT NULL,
    opened_at_us INTEGER NOT NULL,
    since_us     INTEGER,              -- when the oldest item that no revision shows came; NULL: none
    waiting      INTEGER NOT NULL,     -- how many items no revision shows
    last         INTEGER NOT NULL,     -- sequence of the newest item
    revision     INTEGER NOT NULL,
    closed       INTEGER NOT NULL,
    PRIMARY KEY (agent_no, entry)
) WITHOUT ROWID;
CREATE UNIQUE INDEX inbox_digests_open ON inbox_digests (agent_no, resource) WHERE NOT closed;
CREATE INDEX inbox_digests_due ON inbox_digests (since_us) WHERE since_us IS NOT NULL;

CREATE TABLE inbox_revisions (
    agent_no INTEGER NOT NULL,
    entry    INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    through  INTEGER NOT NULL,         -- sequence of the newest item it shows
    at_us    INTEGER NOT NULL,
    PRIMARY KEY (agent_no, entry, revision)
) WITHOUT ROWID;

-- Messages to come: once, at an interval, or by cron.
CREATE TABLE timer_rows (
    tenant        TEXT NOT NULL,
    timer         TEXT NOT NULL,
    agent         TEXT NOT NULL,
    settings      TEXT NOT NULL,
    due_at_us     INTEGER,             -- NULL: it has fired for the last time, or is paused
    fired         INTEGER NOT NULL,
    created_at_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, timer)
) WITHOUT ROWID;
CREATE INDEX timer_rows_due ON timer_rows (due_at_us) WHERE due_at_us IS NOT NULL;

-- A stream that is deleted takes the items along that point into it.
CREATE TRIGGER stream_deleted_inbox AFTER INSERT ON stream_registry WHEN NEW.deleted
BEGIN
    DELETE FROM inbox_rows WHERE stream_id = NEW.stream_id;
    DELETE FROM inbox_seen WHERE stream_id = NEW.stream_id;
END;

-- What an operator sees.
CREATE VIEW agents AS
    SELECT tenant, agent, settings, last_sequence, created_at_us / 1e6 AS created_at
    FROM agent_registry WHERE removed_at_us IS NULL;

CREATE VIEW timers AS
    SELECT tenant, timer, agent, settings, due_at_us / 1e6 AS due_at, fired, created_at_us / 1e6 AS created_at FROM timer_rows;

CREATE VIEW inbox_items AS
    SELECT a.tenant, a.agent, i.sequence, s.name || '/' || i.partition || '/' || i."offset" AS event_id,
           e.topic, e.variant, e.source, CAST(e.payload AS TEXT) AS payload, i.matched_by, i.reason AS match_reason,
           CAST(e.delivery_handle AS TEXT) AS delivery_handle, IFNULL(e.trust, 'trusted') AS trust,
           i.created_at_us / 1e6 AS created_at, i.delivered_at_us / 1e6 AS delivered_at, i.read_at_us / 1e6 AS read_at,
           i.acked_at_us / 1e6 AS acked_at, i.entry
    FROM inbox_rows i JOIN agent_registry a USING (agent_no) JOIN stream_registry s USING (stream_id)
    LEFT JOIN events e ON e.stream_id = i.stream_id AND e.partition = i.partition AND e."offset" = i."offset";
