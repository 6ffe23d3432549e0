"""What ``xamp doctor`` finds out, and how: everything that may break is tried in child processes.

``survey`` decides what to look at next, ``children`` runs a child, ``examine`` is what a child does, ``known`` what is
known so far, ``advice`` which level to take and why. The asking process imports no torch and no backend.
"""
