"""The names by which pickles find functions of xamp: ``xamp.pickled.<name>``, wherever their code stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["pickled_as"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def pickled_as(name: str) -> Callable[[_Function], _Function]:
    """Have pickles name the decorated function ``xamp.pickled.<name>``; :mod:`xamp.pickled` must offer it there."""

    def rename(function: _Function) -> _Function:
        function.__module__, function.__qualname__ = "xamp.pickled", name
        return function

    return rename
