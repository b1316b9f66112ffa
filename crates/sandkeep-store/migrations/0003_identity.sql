-- Who the box is in its tokens, as its creator said it; NULL: nobody in particular.
ALTER TABLE sandboxes ADD COLUMN identity TEXT;
