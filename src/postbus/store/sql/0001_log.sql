-- The log: streams, events in arrival order, identities, readers and their places.
-- Instants are microseconds since 1970 (UTC). Every table whose rows are not covered by the hash chain carries a `seal`,
-- a CRC-32 over the row's facts, so that `postbus verify` sees a flipped bit anywhere that matters.

-- Facts about this store itself; `store_id` ties the anchor file to it.
CREATE TABLE store_facts (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- One row per stream ever made. A deleted stream keeps its row so that its epoch can only grow.
CREATE TABLE stream_registry (
    stream_id     INTEGER PRIMARY KEY,
    name          TEXT NOT NULL UNIQUE,
    settings      TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    created_at_us INTEGER NOT NULL,
    deleted       INTEGER NOT NULL DEFAULT 0,
    seal          INTEGER NOT NULL
);

-- Where the retained part of a partition begins, with the chain and the counters just before it.
-- The other end is not kept here: the last row of the partition in `events` is its head.
CREATE TABLE partitions (
    stream_id    INTEGER NOT NULL,
    partition    INTEGER NOT NULL,
    slot         INTEGER NOT NULL UNIQUE,
    first_offset INTEGER NOT NULL,
    base_bytes   INTEGER NOT NULL,
    base_chain   BLOB NOT NULL,
    seal         INTEGER NOT NULL,
    PRIMARY KEY (stream_id, partition)
) WITHOUT ROWID;

-- The events in arrival order and one compact index; nothing else is written on the append path.
CREATE TABLE events (
    seq             INTEGER PRIMARY KEY,
    stream_id       INTEGER NOT NULL,
    partition       INTEGER NOT NULL,
    "offset"        INTEGER NOT NULL,
    topic           TEXT NOT NULL,
    source          TEXT NOT NULL,
    variant         TEXT NOT NULL,
    key             TEXT,
    payload         BLOB NOT NULL,
    metadata        BLOB,
    headers         BLOB,
    correlation_id  TEXT,
    native_id       TEXT,
    delivery_handle BLOB,
    occurred_at_us  INTEGER,           -- NULL: the same as created_at_us
    created_at_us   INTEGER NOT NULL,
    trust           TEXT,              -- NULL: trusted
    latest_at_us    INTEGER,           -- the latest occurred_at so far in the partition; NULL: this row's own
    bytes_through   INTEGER NOT NULL,  -- bytes of all events of the partition up to and including this one
    crc             INTEGER NOT NULL,  -- CRC-32 of this event alone and of its stream_id, so that salvage can judge it alone
    chain           BLOB NOT NULL      -- SHA-256 over the previous chain and this event
);
CREATE UNIQUE INDEX events_position ON events (stream_id, partition, "offset");

-- Who was here: kept forever (or for the stream's window), also after retention removed the event.
CREATE TABLE identities (
    stream_id     INTEGER NOT NULL,
    native_id     TEXT NOT NULL,
    variant       TEXT NOT NULL,
    partition     INTEGER NOT NULL,
    "offset"      INTEGER NOT NULL,
    created_at_us INTEGER NOT NULL,
    content       BLOB NOT NULL,
    seal          INTEGER NOT NULL,
    PRIMARY KEY (stream_id, native_id, variant)
) WITHOUT ROWID;

-- One row per reader of a stream, and one cursor per partition it reads.
CREATE TABLE readers (
    stream_id     INTEGER NOT NULL,
    consumer      TEXT NOT NULL,
    start         TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    created_at_us INTEGER NOT NULL,
    seal          INTEGER NOT NULL,
    PRIMARY KEY (stream_id, consumer)
) WITHOUT ROWID;

CREATE TABLE cursors (
    stream_id     INTEGER NOT NULL,
    consumer      TEXT NOT NULL,
    partition     INTEGER NOT NULL,
    next_offset   INTEGER NOT NULL,
    committed     INTEGER NOT NULL,
    skipped       INTEGER NOT NULL,
    updated_at_us INTEGER NOT NULL,
    seal          INTEGER NOT NULL,
    PRIMARY KEY (stream_id, consumer, partition)
) WITHOUT ROWID;

-- Audit of moves, pruned by age; not needed for correctness.
CREATE TABLE consumer_commits (
    commit_id        INTEGER PRIMARY KEY,
    stream_id        INTEGER NOT NULL,
    consumer         TEXT NOT NULL,
    partition        INTEGER NOT NULL,
    kind             TEXT NOT NULL,    -- commit | reset | retention
    committed_offset INTEGER NOT NULL,
    committed_at_us  INTEGER NOT NULL
);

-- Projections: kept by an internal reader of the log, milliseconds behind it; dropped and rebuilt at will.
CREATE TABLE projection_place (
    name     TEXT PRIMARY KEY,
    next_seq INTEGER NOT NULL
) WITHOUT ROWID;

-- Which blocks of 256 rows hold a topic.
CREATE TABLE topic_blocks (
    topic TEXT NOT NULL,
    block INTEGER NOT NULL,
    PRIMARY KEY (topic, block)
) WITHOUT ROWID;

-- Which rows belong to a correlation.
CREATE TABLE correlation_rows (
    correlation_id TEXT NOT NULL,
    seq            INTEGER NOT NULL,
    PRIMARY KEY (correlation_id, seq)
) WITHOUT ROWID;

-- Which rows happened in a minute, per partition: how many, and between which rows.
CREATE TABLE time_buckets (
    minute    INTEGER NOT NULL,
    stream_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq  INTEGER NOT NULL,
    events    INTEGER NOT NULL,
    PRIMARY KEY (minute, stream_id, partition)
) WITHOUT ROWID;

-- What an operator sees with any SQLite tool, under the names of the model.
CREATE VIEW streams AS
    SELECT stream_id, name AS stream, settings, epoch, created_at_us / 1e6 AS created_at
    FROM stream_registry WHERE NOT deleted;

CREATE VIEW stream_events AS
    SELECT s.name || '/' || e.partition || '/' || e."offset" AS id,
           s.name AS stream, e.partition, e."offset", e.topic, e.source, e.variant, e.key,
           CAST(e.payload AS TEXT) AS payload, CAST(e.metadata AS TEXT) AS metadata, CAST(e.headers AS TEXT) AS headers,
           e.correlation_id, e.native_id, CAST(e.delivery_handle AS TEXT) AS delivery_handle,
           IFNULL(e.occurred_at_us, e.created_at_us) / 1e6 AS occurred_at, e.created_at_us / 1e6 AS created_at,
           IFNULL(e.trust, 'trusted') AS trust, e.seq
    FROM events e JOIN stream_registry s USING (stream_id);

CREATE VIEW consumers AS
    SELECT s.name AS stream, r.consumer, c.partition, c.next_offset, c.committed, c.skipped, r.start, r.epoch,
           r.created_at_us / 1e6 AS created_at, c.updated_at_us / 1e6 AS updated_at
    FROM readers r JOIN cursors c USING (stream_id, consumer) JOIN stream_registry s USING (stream_id);
