"""Which backends there are, which of them work here, and why one does not."""
