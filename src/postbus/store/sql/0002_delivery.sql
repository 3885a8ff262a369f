-- Deliveries: who subscribes to what, who works on it, and the few events that are not simply done.
-- Everything below a subscription's cursor without a row in `delivery_rows` is done.

-- One row per subscription: its patterns, policies and where its dead letters go, as JSON.
CREATE TABLE subscription_registry (
    tenant        TEXT NOT NULL,
    subscription  TEXT NOT NULL,
    settings      TEXT NOT NULL,
    created_at_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, subscription)
) WITHOUT ROWID;

-- The same patterns in a form that SQL can match: GLOB is exact once the number of dots agrees.
CREATE TABLE subscription_globs (
    tenant       TEXT NOT NULL,
    subscription TEXT NOT NULL,
    glob         TEXT NOT NULL,
    dots         INTEGER NOT NULL,
    PRIMARY KEY (tenant, subscription, glob, dots)
) WITHOUT ROWID;

-- Which process works on a subscription's partition, under which fencing token, until when on the clock of which boot.
-- The owner may have started every event in [cursor, reach): that is the attempt recorded before a handler runs.
CREATE TABLE lanes (
    stream_id    INTEGER NOT NULL,
    consumer     TEXT NOT NULL,
    partition    INTEGER NOT NULL,
    owner        TEXT,
    token        INTEGER NOT NULL,
    boot         TEXT NOT NULL,
    until_us     INTEGER NOT NULL,
    reach        INTEGER NOT NULL,
    PRIMARY KEY (stream_id, consumer, partition)
) WITHOUT ROWID;

-- The exceptions: events that wait for a retry, run long, came out of order, or are dead.
CREATE TABLE delivery_rows (
    stream_id     INTEGER NOT NULL,
    partition     INTEGER NOT NULL,
    "offset"      INTEGER NOT NULL,
    consumer      TEXT NOT NULL,
    status        TEXT NOT NULL,     -- waiting | processing | done | failed
    attempt       INTEGER NOT NULL,  -- how often the handler was started
    alone         INTEGER NOT NULL,  -- above 0: was in flight when a process died, runs with nothing beside it
    replays       INTEGER NOT NULL,
    key           TEXT,
    boot          TEXT NOT NULL,
    due_us        INTEGER NOT NULL,  -- on the monotonic clock of `boot`
    due_at_us     INTEGER NOT NULL,  -- the same on the wall clock, for after a reboot
    error         TEXT,
    dead_stream   TEXT,
    dead_offset   INTEGER,
    updated_at_us INTEGER NOT NULL,
    PRIMARY KEY (stream_id, partition, "offset", consumer)
) WITHOUT ROWID;
CREATE INDEX delivery_rows_by_consumer ON delivery_rows (stream_id, consumer, partition, status, "offset");

-- Side effects that ran: at most once per event, subscription and key.
CREATE TABLE once_results (
    stream_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL,
    consumer  TEXT NOT NULL,
    key       TEXT NOT NULL,
    result    BLOB,                  -- NULL: started, its end was never recorded
    at_us     INTEGER NOT NULL,
    PRIMARY KEY (stream_id, partition, "offset", consumer, key)
) WITHOUT ROWID;

-- Dead letters an operator has put away; the event itself stays in its stream until that is trimmed.
CREATE TABLE dead_letters_purged (
    stream_id INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL,
    at_us     INTEGER NOT NULL,
    PRIMARY KEY (stream_id, "offset")
) WITHOUT ROWID;

-- A stream that is deleted takes with it what became of its events: its offsets are given out again.
CREATE TRIGGER stream_deleted AFTER INSERT ON stream_registry WHEN NEW.deleted
BEGIN
    DELETE FROM lanes WHERE stream_id = NEW.stream_id;
    DELETE FROM delivery_rows WHERE stream_id = NEW.stream_id;
    DELETE FROM once_results WHERE stream_id = NEW.stream_id;
    DELETE FROM dead_letters_purged WHERE stream_id = NEW.stream_id;
END;

CREATE INDEX consumer_commits_by_offset ON consumer_commits (stream_id, consumer, partition, committed_offset);

-- What an operator sees.
CREATE VIEW subscriptions AS
    SELECT tenant, subscription, settings, created_at_us / 1e6 AS created_at FROM subscription_registry;

CREATE VIEW deliveries AS
    SELECT s.name AS stream, d.partition, d."offset", d.consumer AS subscription, d.status, d.attempt, d.error,
           d.due_at_us / 1e6 AS due_at, d.updated_at_us / 1e6 AS updated_at
    FROM delivery_rows d JOIN stream_registry s USING (stream_id);

CREATE VIEW dead_letters AS
    SELECT s.name || '/' || e.partition || '/' || e."offset" AS id,
           json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.subscription"') AS subscription,
           json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_topic"') AS topic,
           json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_stream"') AS origin_stream,
           CAST(json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_partition"') AS INTEGER) AS origin_partition,
           CAST(json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_offset"') AS INTEGER) AS origin_offset,
           json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.reason"') AS reason,
           CAST(json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.attempts"') AS INTEGER) AS attempts,
           json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.error"') AS error,
           CAST(e.payload AS TEXT) AS payload, e.created_at_us / 1e6 AS created_at,
           CASE WHEN p."offset" IS NOT NULL THEN 'purged'
                WHEN d.status = 'failed' AND d.dead_stream = s.name AND d.dead_offset = e."offset" THEN 'open'
                WHEN d.status IS NULL AND NOT EXISTS (
                    SELECT 1 FROM subscription_registry r WHERE s.name GLOB r.tenant || '.*'
                      AND r.subscription = json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.subscription"')) THEN 'open'
                ELSE 'replayed' END AS state,
           e.seq
    FROM events e JOIN stream_registry s ON s.stream_id = e.stream_id AND s.name GLOB '*-dlq'
    LEFT JOIN stream_registry o ON o.name = json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_stream"')
    LEFT JOIN delivery_rows d ON d.stream_id = o.stream_id
        AND d.partition = CAST(json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_partition"') AS INTEGER)
        AND d."offset" = CAST(json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.origin_offset"') AS INTEGER)
        AND d.consumer = json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.subscription"')
    LEFT JOIN dead_letters_purged p ON p.stream_id = e.stream_id AND p."offset" = e."offset"
    WHERE json_extract(CAST(e.headers AS TEXT), '$."postbus.dlq.subscription"') IS NOT NULL;

-- For each event and each subscription that matches it: what became of it there.
CREATE VIEW event_statuses AS
    SELECT e.seq, e.stream_id, e.partition, e."offset", r.consumer,
           CASE WHEN d.status = 'failed' THEN 'failed'
                WHEN d.status = 'processing' THEN 'processing'
                WHEN d.status = 'waiting' THEN 'pending'
                WHEN d.status = 'done' OR e."offset" < c.next_offset THEN 'done'
                WHEN l.owner IS NOT NULL AND e."offset" < l.reach THEN 'processing'
                ELSE 'pending' END AS status,
           d.error,
           CASE WHEN d.status IN ('failed', 'done') THEN d.updated_at_us
                WHEN d.status IS NULL AND e."offset" < c.next_offset THEN
                    (SELECT m.committed_at_us FROM consumer_commits m
                     WHERE m.stream_id = e.stream_id AND m.consumer = r.consumer AND m.partition = e.partition
                       AND m.committed_offset >= e."offset" ORDER BY m.committed_offset LIMIT 1) END AS processed_at_us
    FROM events e JOIN stream_registry s USING (stream_id)
    JOIN readers r ON r.stream_id = e.stream_id
    JOIN cursors c ON c.stream_id = e.stream_id AND c.consumer = r.consumer AND c.partition = e.partition
    LEFT JOIN lanes l ON l.stream_id = e.stream_id AND l.consumer = r.consumer AND l.partition = e.partition
    LEFT JOIN delivery_rows d ON d.stream_id = e.stream_id AND d.partition = e.partition AND d."offset" = e."offset"
        AND d.consumer = r.consumer
    WHERE s.name NOT GLOB '*-dlq' AND EXISTS (
        SELECT 1 FROM subscription_globs g WHERE g.subscription = r.consumer AND s.name GLOB g.tenant || '.*'
          AND ((e.topic GLOB g.glob AND length(e.topic) - length(replace(e.topic, '.', '')) = g.dots)
               OR (g.dots = 2 AND s.name GLOB g.glob AND (s.name = g.glob OR s.name NOT GLOB '*.journal'))));

-- The journal of the ADR: its nine columns, its four statuses; the worst status over all subscribers.
CREATE VIEW event_journal AS
    SELECT e.seq AS id, e.correlation_id, e.topic, e.source, CAST(e.payload AS TEXT) AS payload,
           CASE IFNULL((SELECT max(CASE t.status WHEN 'failed' THEN 3 WHEN 'processing' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END)
                        FROM event_statuses t WHERE t.seq = e.seq),
                       (SELECT CASE WHEN e."offset" < c.next_offset THEN 0 ELSE 1 END FROM cursors c
                        WHERE c.stream_id = e.stream_id AND c.partition = e.partition AND c.consumer = '_dispatch'))
               WHEN 3 THEN 'failed' WHEN 2 THEN 'processing' WHEN 0 THEN 'done' ELSE 'pending' END AS status,
           e.created_at_us / 1e6 AS created_at,
           CASE WHEN NOT EXISTS (SELECT 1 FROM event_statuses t WHERE t.seq = e.seq AND t.status IN ('pending', 'processing'))
                THEN IFNULL((SELECT max(t.processed_at_us) FROM event_statuses t WHERE t.seq = e.seq),
                            (SELECT m.committed_at_us FROM consumer_commits m
                             WHERE m.stream_id = e.stream_id AND m.consumer = '_dispatch' AND m.partition = e.partition
                               AND m.committed_offset >= e."offset" ORDER BY m.committed_offset LIMIT 1)) / 1e6
                END AS processed_at,
           (SELECT group_concat(t.error, '; ' ORDER BY t.consumer) FROM event_statuses t
            WHERE t.seq = e.seq AND t.error IS NOT NULL) AS error
    FROM events e JOIN stream_registry s ON s.stream_id = e.stream_id AND s.name NOT GLOB '*-dlq';

-- An operator's re-queue: UPDATE event_journal SET status = 'pending' WHERE id = …;
CREATE TRIGGER event_journal_requeue INSTEAD OF UPDATE OF status ON event_journal
BEGIN
    SELECT RAISE(ABORT, 'only failed events can be re-queued, by setting their status to pending')
    WHERE NEW.status IS NOT 'pending' OR OLD.status IS NOT 'failed'
       OR (NEW.id, NEW.correlation_id, NEW.topic, NEW.source, NEW.payload, NEW.created_at, NEW.processed_at, NEW.error)
          IS NOT (OLD.id, OLD.correlation_id, OLD.topic, OLD.source, OLD.payload, OLD.created_at, OLD.processed_at, OLD.error);
    UPDATE delivery_rows SET status = 'waiting', attempt = 0, alone = 0, replays = replays + 1, boot = '', due_us = 0,
           due_at_us = 0, error = NULL
    WHERE status = 'failed' AND (stream_id, partition, "offset") =
          (SELECT e.stream_id, e.partition, e."offset" FROM events e WHERE e.seq = OLD.id);
END;
