-- One text for SQLite and PostgreSQL: ids are TEXT, times BIGINT milliseconds,
-- yes/no BIGINT 1/0, structured values JSON in TEXT.

CREATE TABLE sandboxes (
    id               TEXT   PRIMARY KEY,
    template         TEXT   NOT NULL,
    isolation        TEXT   NOT NULL,
    limits           TEXT   NOT NULL,
    state            TEXT   NOT NULL,
    pooled           BIGINT NOT NULL,
    created_at       BIGINT NOT NULL,
    started_at       BIGINT NOT NULL,
    end_at           BIGINT,
    on_timeout       TEXT   NOT NULL,
    env              TEXT   NOT NULL,
    metadata         TEXT   NOT NULL,
    access_token     TEXT   NOT NULL,
    gone             TEXT,
    gone_at          BIGINT,
    oom_kills        BIGINT NOT NULL,
    ward             TEXT,
    idempotency_key  TEXT   UNIQUE,
    idempotency_hash TEXT
);

CREATE INDEX sandboxes_by_start ON sandboxes (started_at, id);
CREATE INDEX sandboxes_by_state ON sandboxes (state, started_at, id);

CREATE TABLE events (
    seq        BIGINT PRIMARY KEY,
    at         BIGINT NOT NULL,
    sandbox_id TEXT   NOT NULL,
    kind       TEXT   NOT NULL,
    body       TEXT   NOT NULL
);

CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);

-- Counters live here and not in an identity column: every writer takes the row's lock, so
-- the order of numbers is the order of commits and a reader "after N" never misses one.
CREATE TABLE meta (
    name  TEXT   PRIMARY KEY,
    value BIGINT NOT NULL
);

INSERT INTO meta (name, value) VALUES ('event_seq', 0);
