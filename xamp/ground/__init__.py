"""Small helpers that every package may use. Of xamp, they import only ``xamp.errors``."""
