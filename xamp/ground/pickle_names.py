"""Gives functions and classes a fixed name for pickles, ``xamp.pickled.<name>``, so that their code can move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["pickled_as"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def pickled_as(name: str) -> Callable[[_Function], _Function]:
    """Make pickles store a function or class as ``xamp.pickled.<name>``; :mod:`xamp.pickled` must provide it."""

    def rename(function: _Function) -> _Function:
        function.__module__, function.__qualname__ = "xamp.pickled", name
        return function

    return rename
