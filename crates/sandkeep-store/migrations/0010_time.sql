-- Pauses and where in time a box is, as JSON; NULL: a box from before.
ALTER TABLE sandboxes ADD COLUMN time TEXT;

-- What boxes were at some moment. A point may outlive its box and its parent.
CREATE TABLE points (
    id            TEXT   PRIMARY KEY,
    sandbox_id    TEXT   NOT NULL,
    parent        TEXT,
    name          TEXT,
    tags          TEXT   NOT NULL,
    kind          TEXT   NOT NULL,
    engine        TEXT,
    why_disk_only TEXT,
    created_at    BIGINT NOT NULL,
    bytes         BIGINT NOT NULL,
    isolation     TEXT   NOT NULL,
    template      TEXT   NOT NULL,
    limits        TEXT   NOT NULL
);

CREATE INDEX points_by_sandbox ON points (sandbox_id, created_at, id);
CREATE INDEX points_by_name ON points (name, created_at);
