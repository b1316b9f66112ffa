-- What a client of E2B asked for that has no place elsewhere, as JSON; NULL: nothing.
ALTER TABLE sandboxes ADD COLUMN e2b TEXT;
