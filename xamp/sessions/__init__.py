"""The public calls, which tie the other wings together."""
