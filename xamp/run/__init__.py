"""Runs scripts that were written for CUDA, for Apex or for Ascend as they are: the command ``xamp run``.

``redirect`` is the block in which requests for another device are answered by the device in use. ``table`` says which
requests, as data; ``devices`` maps a device argument. Each name in the table has a handler, which makes what is put in
its place: ``handlers`` for placing data, ``casts`` for autocast and legacy types, ``names`` for torch.cuda's
functions, ``ranks`` for process groups. A handler gets a ``site``; ``standins`` are classes, and ``patches`` puts all
of it in place and takes it out. ``launch`` serves launchers and child processes; ``ascend`` (with ``ascend_modules``)
has the names of torch_npu. ``report`` counts, ``ages`` explains faults that come from a script's age, ``script`` runs.
"""
