-- The kernel: what happens at set times, and what humans are asked before a tool runs.

-- One row per schedule. Exactly one of at_us, every_us and cron is there.
CREATE TABLE schedules (
    tenant         TEXT NOT NULL,
    schedule       TEXT NOT NULL,
    at_us          INTEGER,
    every_us       INTEGER,           -- counted from the anchor, so that it does not drift
    cron           TEXT,              -- five fields, in `zone`
    zone           TEXT NOT NULL,
    anchor_us      INTEGER NOT NULL,
    until_us       INTEGER,           -- the last instant it may fire at
    topic          TEXT NOT NULL,
    payload        BLOB NOT NULL,     -- JSON
    trust          TEXT NOT NULL,     -- of whoever made or changed it: what it publishes is trusted no more
    made_by        TEXT NOT NULL,
    correlation_id TEXT,
    user_id        TEXT,              -- whom it is for, and in which session
    session_id     TEXT,
    state          TEXT NOT NULL,     -- active | paused | done | cancelled | failed
    error          TEXT,              -- why it failed, or the last fire did
    next_us        INTEGER,           -- null once there is none
    last_us        INTEGER,
    fires          INTEGER NOT NULL,
    skipped        INTEGER NOT NULL,  -- fire times that passed while nothing ran
    created_at_us  INTEGER NOT NULL,
    updated_at_us  INTEGER NOT NULL,
    PRIMARY KEY (tenant, schedule)
) WITHOUT ROWID;
CREATE INDEX schedules_due ON schedules (tenant, next_us) WHERE state = 'active';

-- The latest fires of each schedule, and which event each became.
CREATE TABLE schedule_fires (
    tenant    TEXT NOT NULL,
    schedule  TEXT NOT NULL,
    fire_us   INTEGER NOT NULL,
    stream    TEXT NOT NULL,
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL,
    PRIMARY KEY (tenant, schedule, fire_us)
) WITHOUT ROWID;

-- One row per question. It is bound to the digest of tool and arguments, and its answer can be used once.
CREATE TABLE approvals (
    tenant         TEXT NOT NULL,
    request_id     TEXT NOT NULL,
    digest         TEXT NOT NULL,
    tool_name      TEXT NOT NULL,
    arguments      BLOB NOT NULL,     -- JSON
    server_alias   TEXT NOT NULL,
    channel_id     TEXT,              -- where it was asked; only there can it be answered
    user_id        TEXT,              -- on whose behalf the tool is called; nobody else can answer
    asked_by       TEXT NOT NULL,
    correlation_id TEXT,
    state          TEXT NOT NULL,     -- pending | approved | denied | expired | spent
    principal      TEXT,              -- who answered
    reason         TEXT,
    created_at_us  INTEGER NOT NULL,
    expires_at_us  INTEGER NOT NULL,
    answered_at_us INTEGER,
    spent_at_us    INTEGER,
    PRIMARY KEY (tenant, request_id)
) WITHOUT ROWID;
CREATE INDEX approvals_pending ON approvals (tenant, expires_at_us) WHERE state = 'pending';
