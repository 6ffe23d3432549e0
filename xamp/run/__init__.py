"""Runs scripts that were written for CUDA, for Apex or for Ascend as they are: the command ``xamp run``.

``redirect`` is the block in which requests for another device are answered by the device in use. ``table`` says which
requests, as data; ``devices`` maps a device argument. Each name in the table has a handler, which makes what is put in
its place: ``handlers`` for placing data, ``casts`` for autocast and legacy types, ``names`` for torch.cuda's
functions, ``ranks`` for process groups. A handler gets a ``site``; ``standins`` are classes, and ``patches`` puts all
of it in place and takes it out. ``launch`` serves launchers and child processes; ``ascend`` (with ``ascend_modules``)
has the names of torch_npu. ``report`` counts, ``ages`` explains faults that come from a script's age, ``script`` runs.

Modules: ``xamp run``: ``redirect`` is the block, ``table`` what is redirected, as data. Each name has a handler
(``handlers``, ``casts``, ``names``, ``ranks``) that gets a ``site`` and makes what ``patches`` puts in its place;
``devices`` maps device arguments, ``standins`` are classes. ``launch`` serves launchers and child processes,
``ascend`` and ``ascend_modules`` are the names of torch_npu, ``report`` counts, ``ages`` explains faults, ``script``
runs the script.

``script.run`` enters a ``Redirection``. Its ``start`` fills torch's tables that are made by name, then goes through
``table`` and puts the replacements in place, each recorded in ``Patches``; one exit stack takes out everything.
``x.cuda(1)`` then calls the function that ``handlers.move`` made: it notes the call (``Report.note`` looks up the
script's line the first time), asks ``Target.map`` for the device in use, and calls torch's own ``Tensor.to``.
Attributes are replaced, and no mode is pushed, because a mode costs 1 us at every call of torch and does not reach
other threads. torch calls its own ``torch.cuda.manual_seed_all`` and ``is_available``; ``site.is_inside`` sees that
the caller is torch or xamp, and hands such calls on. A process that multiprocessing spawns starts its own redirection
while it reads what its parent sent (``launch.reach_children``); a forked one has it already. Both leave their counts
in a folder that the parent reads at the end.
"""
