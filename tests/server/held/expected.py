"""What is to come of the memory of a sandbox that holds something."""

WAKES = "wakes"
"""Its memory is written, and comes back."""
EITHER = "either"
"""It may depend on the kernel. What must not be is a memory that was written and does not come back."""
