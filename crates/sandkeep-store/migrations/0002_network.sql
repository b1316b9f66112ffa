-- What the box may reach, as its owner set it; NULL: nothing.
ALTER TABLE sandboxes ADD COLUMN network TEXT;
