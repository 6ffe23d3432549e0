"""Small things that every wing may use; they import nothing above themselves."""
