"""Which operator a device runs in which dtype, found by calling it; for display and comparison."""
