-- The spool: events that wait on disk for a remote that cannot be reached, in the order they came.

CREATE TABLE spool_rows (
    sequence       INTEGER PRIMARY KEY AUTOINCREMENT,
    stream         TEXT NOT NULL,
    identity       TEXT NOT NULL,      -- sent along, so that the remote knows an event it has already
    tried          INTEGER NOT NULL,   -- 1: it was sent before it was kept here, and no answer came
    draft          BLOB NOT NULL,      -- JSON
    bytes          INTEGER NOT NULL,
    attempts       INTEGER NOT NULL,   -- how often the remote refused this event; an outage does not count
    dead           INTEGER NOT NULL,   -- 1: its dead letter is open, and a replay sets it back to 0
    error          TEXT,
    enqueued_at_us INTEGER NOT NULL
);
CREATE INDEX spool_pending ON spool_rows (sequence) WHERE NOT dead;

-- How much waits: kept, so that nobody has to count.
CREATE TABLE spool_totals (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    rows  INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);
INSERT INTO spool_totals VALUES (1, 0, 0);

CREATE TRIGGER spool_added AFTER INSERT ON spool_rows WHEN NOT NEW.dead
BEGIN
    UPDATE spool_totals SET rows = rows + 1, bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER spool_removed AFTER DELETE ON spool_rows WHEN NOT OLD.dead
BEGIN
    UPDATE spool_totals SET rows = rows - 1, bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER spool_buried AFTER UPDATE OF dead ON spool_rows WHEN NEW.dead <> OLD.dead
BEGIN
    UPDATE spool_totals SET rows = rows + OLD.dead - NEW.dead, bytes = bytes + (OLD.dead - NEW.dead) * NEW.bytes;
END;

-- A spooled event that was given up on is a failed delivery like any other, of the consumer `_spool` at the offset that
-- is its sequence: replaying its dead letter puts it back in its place, purging it removes it.
CREATE TRIGGER spool_replayed AFTER UPDATE OF status ON delivery_rows
WHEN NEW.consumer = '_spool' AND OLD.status = 'failed' AND NEW.status = 'waiting'
BEGIN
    UPDATE spool_rows SET dead = 0, attempts = 0, error = NULL WHERE sequence = NEW."offset" AND dead;
    UPDATE delivery_rows SET status = 'done'
    WHERE stream_id = NEW.stream_id AND partition = NEW.partition AND "offset" = NEW."offset" AND consumer = NEW.consumer;
END;
CREATE TRIGGER spool_purged AFTER DELETE ON delivery_rows WHEN OLD.consumer = '_spool' AND OLD.status = 'failed'
BEGIN
    DELETE FROM spool_rows WHERE sequence = OLD."offset" AND dead;
END;

-- What an operator sees.
CREATE VIEW pending_events AS
    SELECT sequence, identity AS id, stream,
           CASE WHEN json_valid(CAST(draft AS TEXT)) THEN json_extract(CAST(draft AS TEXT), '$.topic') END AS topic,
           CASE WHEN json_valid(CAST(draft AS TEXT)) THEN json_extract(CAST(draft AS TEXT), '$.payload') END AS payload,
           bytes, attempts, error, enqueued_at_us / 1e6 AS enqueued_at
    FROM spool_rows WHERE NOT dead;
