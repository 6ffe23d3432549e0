"""Decides which operator runs in which dtype, and casts."""
