-- Why a point was made when nobody asked for it, as JSON.
ALTER TABLE points ADD COLUMN reason TEXT;
-- What is in it and not in its parent.
ALTER TABLE points ADD COLUMN added_bytes BIGINT NOT NULL DEFAULT 0;
