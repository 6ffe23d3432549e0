"""Excludes functions from torch.compile without importing the compiler, and makes it forget."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xamp.torch_compat.torch_private import dynamo

__all__ = ["break_graphs", "eager_by_rule", "forget_graphs", "keep_eager", "own_code"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def keep_eager(function: _Function, *, inner: bool = True) -> _Function:
    """Make the compiler skip the frames of ``function``, and if ``inner`` also the frames of the functions it calls.

    If the compiler cannot compile a function, it runs that function eagerly and tries to compile each function that it
    calls. A function that sets or reads the thread's state would then do so while it is traced, and not when it runs.
    The compiler can still inline ``function`` into another function that it traces.
    """
    dynamo.skip_code(function.__code__, inner=inner)
    return function


keep_eager(keep_eager)  # a name of xamp that is first looked up in compiled code imports a module there


def break_graphs(why: str) -> Callable[[_Function], _Function]:
    """Make the compiler break the graph where a function is called, as ``torch.compiler.disable`` does.

    Args:
        why: the reason, for the compiler's messages.
    """

    def exclude(function: _Function) -> _Function:
        excluded: Any = keep_eager(function)
        excluded._torchdynamo_disable, excluded._torchdynamo_disable_msg = True, why
        return excluded  # type: ignore[no-any-return]

    return exclude


eager_by_rule = break_graphs("loss scaling, clipping and optimizer steps are eager by rule; forwards are compiled")
"""Decorates what users call around a backward and a step: it runs as Python, with all that it calls."""


def own_code(function: _Function) -> _Function:
    """Return a copy of ``function`` that shares no code object: of a wrapper that is made again for each class.

    The compiler keeps its graphs by code object, and compiles no more after 8.
    """
    given: Any = function
    made = types.FunctionType(
        given.__code__.replace(), given.__globals__, given.__name__, given.__defaults__, given.__closure__
    )
    for name in ("__kwdefaults__", *functools.WRAPPER_ASSIGNMENTS):
        if hasattr(given, name):
            setattr(made, name, getattr(given, name))
    made.__dict__.update(given.__dict__)
    return made  # type: ignore[return-value]


def forget_graphs() -> None:
    """Make the compiler forget what it has compiled, if it has compiled anything.

    Where there is CUDA, a reset imports all of inductor: seconds, and modules of torch that warn of what is deprecated.
    """
    if dynamo.graphs_seen():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compiler.reset()
