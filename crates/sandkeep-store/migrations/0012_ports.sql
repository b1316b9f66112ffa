-- Who reaches the ports of a sandbox through the gateway: 'private' or 'public'; NULL: a
-- sandbox from before, whose ports are public.
ALTER TABLE sandboxes ADD COLUMN ports TEXT;
