"""The private names of torch that the core uses, each in a module by theme; no other module of the core names one.

A release of torch may change or drop such a name without notice. So all of them are listed in
:mod:`xamp.ground.torch_private.names`, each with the release that brought it and what xamp does without it, and a test
asks the torch that is there for each. ``ci/private_names.py`` sees that no other module names one.

A module binds torch's own objects when it is imported. So a call costs what it costs under torch's name, and
torch.compile sees torch's function. What torch replaces, or imports late, is looked up in a function when it is asked
for. A name that some release lacks is asked for with ``hasattr``.
"""
