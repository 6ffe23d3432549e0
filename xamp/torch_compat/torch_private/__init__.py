"""The private names of torch that the core uses, each in a module by theme; no other module of the core names one.

A release of torch may change or drop such a name without notice. So all of them are listed in
:mod:`xamp.torch_compat.torch_private.names`, each with the release that brought it and what xamp does without it, and a
test asks the torch that is there for each. ``ci/private_names.py`` sees that no other module names one.

A module binds torch's own objects when it is imported. So a call costs what it costs under torch's name, and
torch.compile sees torch's function. What torch replaces, or imports late, is looked up in a function when it is asked
for. A name that some release lacks is asked for with ``hasattr``.

``xamp/torch_compat/torch_private/names.py`` has a line for each name: the packages that use it, since which release
torch has it, and what xamp does in a release without it. Nine are public too, as ``torch.is_autocast_enabled`` is:
libraries that run scripts of one device on another replace what has the public name, so it is not taken; they do not
count for the core. The script compares the lines with the modules and their users.
``tests/unit/torch_compat/test_torch_private.py`` asks the torch that is there for every line.

The modules bind torch's own objects when they are imported. So a call costs what it costs under torch's name, and the
compiler sees torch's function. What torch imports late or replaces is looked up by a function (``late``), at each
call. Two attributes are read at each forward, where a call would cost too much: they are looked up in the dicts
``compiler_attributes`` and ``ddp_attributes``. Where a release lacks a name, the module asks with ``hasattr`` and
puts something else in its place; its users do not see which. A test that replaces such a function replaces it in the
module here, as xamp calls it.
"""
