"""Which operator runs in which dtype."""
