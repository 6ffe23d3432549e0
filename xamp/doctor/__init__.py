"""The examination behind ``xamp doctor``. Child processes run everything that may break.

``survey`` decides what to examine next, ``children`` runs a child process, and ``examine`` is the code that the child
runs. ``known`` keeps what is known so far. ``trial`` checks what a backend declares. ``advice`` says which level to use
and why. The parent process imports no torch and no backend.

Modules: ``xamp doctor``: ``survey`` decides what to look at, ``children`` runs child processes, ``examine`` is what a
child does, ``trial`` tries what a backend declares, ``known`` and ``lists`` make findings, ``advice`` names the
level.
"""
