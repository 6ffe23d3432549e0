"""Ascend NPUs: the chips, and an emulation of them on any CPU."""
