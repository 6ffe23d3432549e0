"""Values: nested ones, single arguments, messages, undos. Of xamp, they import errors and torch_compat only.

Modules: ``arguments`` reads single arguments, ``accel_names`` has the names that ``accel``, ``run`` and ``port`` share,
``shown`` is for values in messages. Casts of nested values: ``containers`` does what is common in a loop and the rest
by ``walk``, of which one class is what the compiler traces; ``forms`` knows the kinds, ``ways`` reads and writes them.
``class_swap`` gives an object a subclass of its class, ``own_hooks`` keeps hooks out of pickles, ``lowered`` knows
which tensors were cast and their masters, ``undo`` is the list of undos, ``late_reads`` has numbers that the host reads
later, and ``followers`` models that follow something before each forward.
"""
