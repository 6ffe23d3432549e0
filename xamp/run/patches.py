"""Puts values in the place of attributes, and restores every one of them in reverse order."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from xamp.casting.script import forget_script, tell_script
from xamp.torch_compat.compiler import forget_graphs
from xamp.torch_compat.torch_private import dynamo, originals

__all__ = ["Patches", "clear_caches", "prepare_torch"]

_ABSENT = object()


class Patches:
    """The attributes that were replaced. :meth:`undo` restores them, also where the script set them itself since."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any, *, script: bool = False) -> None:
        """Put ``value`` in the place of ``owner.name``.

        Args:
            owner: a module or a class.
            name: the attribute; it need not exist.
            value: what to put there.
            script: whether TorchScript shall go on compiling the original.
        """
        # The owner's own attribute, not one that a class inherits or that a module's __getattr__ finds.
        before = vars(owner).get(name, _ABSENT)
        if script:
            tell_script(getattr(owner, name), value)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value if script else None))

    def undo(self) -> None:
        """Restore everything."""
        while self._done:
            owner, name, before, told = self._done.pop()
            if told is not None:
                forget_script(told)
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


def prepare_torch(patches: Patches) -> None:
    """Fill the tables that torch makes once, by looking up names: they must not keep what is replaced later.

    Args:
        patches: restores the compiler's counter, which a reset replaces.
    """
    originals.list_device_constructors()
    with contextlib.suppress(Exception):  # a torch whose compiler cannot be imported compiles nothing
        dynamo.list_functions()
        owner, counter = originals.compile_counter()
        patches.replace(owner, counter, getattr(owner, counter))
    with contextlib.suppress(Exception):
        originals.list_safe_globals()


def clear_caches() -> None:
    """Clear what torch remembers of the functions that stood in a place."""
    for function in vars(torch.overrides).values():
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()
    forget_graphs()
