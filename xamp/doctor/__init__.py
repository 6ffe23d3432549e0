"""The examination behind ``xamp doctor``. Child processes run everything that may break.

Modules: ``machine`` decides what to examine next, ``children`` runs a child process, and ``examine`` is the code that
the child runs. ``known`` keeps what is known so far, ``declared`` checks what a backend declares, ``lists`` compares
lists of autocast with the table, and ``advice`` says which level to use and why. The parent process imports no torch
and no backend.
"""
