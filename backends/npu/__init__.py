"""Ascend NPUs: the backend, a table of chips, and an emulation of them on any CPU."""
