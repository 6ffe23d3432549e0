"""Stands in for a real Apex."""
