"""Decides which operator runs in which dtype, and casts.

Modules: which operator runs in which dtype. ``region`` is what a method runs in, and the wrapper that runs it there;
``forward`` gives a model the subclass with such methods, ``inputs`` casts the arguments but for those that
``cast_model_inputs`` names, ``write_back`` writes into the caller's objects what a forward wrote into their copies,
``unseen_results`` says what in a result is not looked into, ``dtype_errors`` adds a cure to errors about dtypes, for
which ``entry_points`` watches further methods, ``export`` lets a model write itself out as fp32, ``active`` enters and
leaves regions, ``region_mark`` describes a region to the code inside it, ``features_in_use`` records which
features of regions are in use, ``recompute`` and ``node_numbers`` find the region again in backward. ``autocast`` is
``xamp.autocast``, ``functions`` has the decorators, ``registered`` replaces functions, ``custom_function`` is
``custom_fwd`` and ``custom_bwd``, ``exact_fp32`` is ``xamp.exact_fp32``, ``script`` serves TorchScript. ``ops/`` lists
the op policies: ``table`` is the portable table as data, ``portable`` adds an entry where a device's own list lacks it
or differs; ``fixed_dtype`` adds those that act under ``"native"`` too, where a device casts to one dtype whatever the
region's; both are made of ``parts``, and of ``layers`` for recurrent layers. For fp8: ``fp8_regions``, ``fp8_linear``.

- Class swap, not hooks or closures on forward. So copies run with their own weights, replicas carry the region,
  pickles are plain, and the compiler can trace it.

- How code knows its region. Eager and traced code: by the mark on the thread. The compiler's guards and caches: by
  the slot, the autocast state of a device that nobody has (``region_mark.SLOT``). Code that activation checkpointing
  recomputes has neither: torch's checkpointing is given a function that restores them (``recompute``); for other
  libraries the number of the current autograd node is looked up (``node_numbers``). Code that reads marks says so in
  ``features_in_use.needs``.

- What sets a thread's state is never compiled by itself (``compiler.keep_eager``). If the compiler gives up on a
  function, it compiles the functions that this one calls. ``enter`` would then set the state while it is traced, not
  when it runs. This happened once: an LSTM ran in wrong dtypes.

- Registered functions act in xamp's regions only. The wrapper stands in torch, where everybody calls it; outside a
  region it passes the call on unchanged. Two things reach further because the user asked for it: decorators
  (``half_function``) follow any autocast, and a handle of ``amp.init`` casts everywhere.
"""
