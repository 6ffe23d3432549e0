"""The registered backends: which there are, which of them work here, and why one does not."""
