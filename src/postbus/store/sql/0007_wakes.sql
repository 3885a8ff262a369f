-- Waking agents: what each target has been told, and every wake there was. What is still to be announced is not kept
-- here: it is what lies in the inbox above the mark, put there by the transaction that added the items.

CREATE TABLE wake_targets (
    agent_no    INTEGER NOT NULL,
    target      TEXT NOT NULL,
    place       TEXT NOT NULL,     -- where it was woken; a target that was moved elsewhere starts afresh
    state       TEXT NOT NULL,     -- idle | sending | leased | retrying | offline | removed
    why         TEXT,              -- the last failure
    announced   INTEGER NOT NULL,  -- the mark: items up to here have been announced,
    hidden      TEXT NOT NULL,     -- but for these that no revision of their digest showed (JSON list of sequences)
    short       INTEGER NOT NULL,  -- the newest item when there were too few to wake for
    failures    INTEGER NOT NULL,  -- in a row
    activation  TEXT,              -- the one that was begun and is not known to have arrived
    answered    INTEGER NOT NULL,  -- whether the agent acked some of what is being announced right now
    owner       TEXT,              -- who sends, under which fencing token
    token       INTEGER NOT NULL,
    boot        TEXT NOT NULL,
    until_us    INTEGER NOT NULL,  -- when sending, leased or retrying ends, on the monotonic clock of `boot`
    until_at_us INTEGER NOT NULL,  -- the same on the wall clock, for after a reboot
    PRIMARY KEY (agent_no, target)
) WITHOUT ROWID;

-- One row per wake: what it announced, how often it was tried, what came of it.
CREATE TABLE activation_rows (
    activation     TEXT PRIMARY KEY,
    agent_no       INTEGER NOT NULL,
    target         TEXT NOT NULL,
    new_item_count INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL,
    last_sequence  INTEGER NOT NULL,
    through        INTEGER NOT NULL,  -- the mark it moves its target to
    hidden         TEXT NOT NULL,
    attempts       INTEGER NOT NULL,
    outcome        TEXT NOT NULL,     -- sending | woken | failed | unknown | answered | replaced | avoided
    error          TEXT,
    created_at_us  INTEGER NOT NULL,
    sent_at_us     INTEGER NOT NULL,  -- the last attempt
    ended_at_us    INTEGER
) WITHOUT ROWID;
CREATE INDEX activation_rows_by_target ON activation_rows (agent_no, target, created_at_us);

-- What a target has cost and saved: events, items, wakes, failures, avoided.<reason>.
CREATE TABLE wake_counters (
    agent_no INTEGER NOT NULL,
    target   TEXT NOT NULL,
    name     TEXT NOT NULL,
    value    INTEGER NOT NULL,
    PRIMARY KEY (agent_no, target, name)
) WITHOUT ROWID;

-- An ack ends the lease, in the transaction of the ack; during a wake it shows that the wake has arrived.
CREATE TRIGGER inbox_acked AFTER UPDATE OF acked_at_us ON inbox_rows
WHEN OLD.acked_at_us IS NULL AND NEW.acked_at_us IS NOT NULL
BEGIN
    UPDATE wake_targets SET state = 'idle' WHERE agent_no = NEW.agent_no AND state = 'leased';
    UPDATE wake_targets SET answered = 1
    WHERE agent_no = NEW.agent_no AND state = 'sending' AND NOT answered
      AND (announced < NEW.sequence OR hidden <> '[]');
END;

-- What an operator sees.
CREATE VIEW activations AS
    SELECT w.activation AS id, a.tenant, a.agent, w.target, w.new_item_count, w.first_sequence, w.last_sequence,
           w.attempts, w.outcome, w.error, w.created_at_us / 1e6 AS created_at, w.sent_at_us / 1e6 AS sent_at,
           w.ended_at_us / 1e6 AS ended_at
    FROM activation_rows w JOIN agent_registry a USING (agent_no);
