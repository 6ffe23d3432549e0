"""Hooks of modules that stay with the session: pickles and copies of the module come without them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["keep_from_pickles", "pickle_whole"]


def keep_from_pickles(hooks: Any, is_ours: Callable[[Any], bool]) -> None:
    """Make ``hooks``, the hooks of one kind of a module, pickle and copy without those of which ``is_ours`` is true.

    The dict stays the object that it is: a handle, with which a user removes a hook, refers to it.
    """
    held_weakly = weakref.ref(hooks)

    def reduce(protocol: Any) -> Any:
        del protocol
        found = held_weakly()
        assert found is not None, "it is being pickled"
        return OrderedDict, (), None, None, iter([(key, hook) for key, hook in found.items() if not is_ours(hook)])

    hooks.__reduce_ex__ = reduce


def pickle_whole(hooks: Any) -> None:
    """Undo :func:`keep_from_pickles`."""
    vars(hooks).pop("__reduce_ex__", None)
