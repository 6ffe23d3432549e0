"""The public calls of xamp. They combine what the other packages do.

1. ``sessions.initialize`` puts the arguments into a ``Request`` and into ``Arguments``. ``parse_level`` and
   ``compile_policy`` refuse what is wrong on every device.
2. ``checks.device_of`` finds the device of the parameters. ``registry.resolve`` finds the backend: the argument, else
   ``XAMP_BACKEND``, else the best for the device type. ``plugins.ALIASES`` knows ``"apex"``: the device's own
   backend, with the op policy of that name. ``level="auto"`` is resolved by ``Capabilities.fast_dtypes``, and
   ``compile_policy`` makes the policy.
3. ``checks`` refuses what this device, model or optimizer cannot do. Up to here nothing has been changed.
4. ``set_up.set_up`` does the rest. ``lowering.ModelCasts`` lists the parameters and buffers to lower and the modules
   that stay fp32, and allocates the low-precision values of the parameters, the largest allocation. If memory runs
   out here, nothing has changed.
5. The op policy prepares torch. The entries of ``"portable"`` (``OpPolicy.install``) stay for the rest of the process
   and act only in its regions; functions that ``"apex"`` replaces (``OpPolicy.hold``) come back when the session
   ends. How to undo a change is listed before it is made (``values.undo.Undo``): low-precision values go into the
   parameters (a master takes over the fp32 storage), state-dict hooks, each model and each module kept in fp32 gets
   the subclass whose methods run in its ``Region``, masters go into ``param_groups`` (``set_up.add_optimizers`` by
   ``optimizer.replace_params``), the fused implementation, the managed subclass of the optimizer. An exception,
   Ctrl-C included, unwinds the list at once, also after the last change; ``session.close()`` does so later.

``amp.initialize`` of ``xamp.apex`` has its own steps 1 to 3 (``_frontend``, ``_start``), which make the policy from
Apex's properties. It then calls ``set_up.set_up``, which is steps 4 and 5, with ``ApexEngine`` as the engine. With
``delegate=True`` the function in ``DELEGATES`` does the rest in place of steps 4 and 5. A second call that adds
optimizers to a session without any goes through ``set_up.attach``; ``enabled=False`` makes an engine that does
nothing.

Who owns what: the optimizer holds its ``OptimizerState`` (attribute ``_xamp``); that holds its ``Gradients`` and the
``Engine``. The engine holds models and optimizers weakly. ``session._sessions`` leads weakly from each model, wrapper
and optimizer to its ``Session``. ``masters`` has one weak map from low-precision parameter to master. So everything
goes when models and optimizers go.

An exception, Ctrl-C too, may come at any bytecode. One rule holds, and ``tests/faults/test_injection.py`` asks it at
every line:

- ``initialize``, ``close`` and the loading of states are done whole or not at all: a change registers its undo first
  (``Undo``), and an undo that is run twice does no harm.
- Where a step writes (entering and leaving ``scale_loss``, ``master_params``, the step, clipping, ``zero_grad``), a
  mark is set before and taken away after (``scaling/writing_mark.py``). Whatever reaches the session next finds it
  first: it drops the gradients of the window, lets the model follow its masters, lowers the flags, and says once what
  was lost. From there training goes on as from the states that are there. A refusal marks nothing, nor does code of
  others that a step calls.
- An open ``scale_loss`` whose context manager is gone was abandoned, and its backward is dropped; where a traceback
  still holds it, one call is refused before that.
"""
