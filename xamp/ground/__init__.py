"""Small helpers that every wing may use. Of xamp, they import only ``xamp.errors``."""
