"""Finds methods that use parts of a model whose parameters are cast and do not run under the policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from xamp.torch_compat.compiler import own_code

__all__ = ["entry_points", "with_explanation"]


def with_explanation(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``name`` of a model, which does not run under the policy, so that a dtype error says so."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            from xamp.casting import dtype_errors  # loaded where one is raised

            dtype_errors.explain_method(error, self, name)
            raise

    return own_code(method)


def entry_points(module: nn.Module, under_policy: Iterable[str]) -> tuple[str, ...]:
    """Return the names of public methods, of classes other than torch's, that use parts of ``module`` directly.

    Such a method (``encode``, ``generate``) gets parameters that are cast, and arguments that are not. A method that
    only calls the model itself, or methods ``under_policy``, is not among them.
    """
    skipped = set(under_policy)
    functions = {  # what nn.Module has too (``to``, ``zero_grad``) is no way into the network
        name: found
        for name, found in _functions_of(type(module))
        if name not in skipped and not hasattr(nn.Module, name)
    }
    using = {name for name, found in functions.items() if not module._modules.keys().isdisjoint(_names_in(found))}
    grown = True
    while grown:
        calling = {name for name, found in functions.items() if not using.isdisjoint(_names_in(found))}
        grown = not calling <= using
        using |= calling
    suspends = (inspect.isgeneratorfunction, inspect.iscoroutinefunction)
    public = (name for name in using if not name.startswith("_"))
    return tuple(sorted(name for name in public if not any(test(functions[name]) for test in suspends)))


def _functions_of(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods of ``kind`` that stand in classes of others, as they are found."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, FunctionType):
                yield name, value
            seen.add(name)


@functools.lru_cache(maxsize=4096)
def _names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of all attributes and globals in the code of ``function``."""
    inner = inspect.unwrap(function)
    found: set[str] = set()
    left = [inner.__code__] if isinstance(inner, FunctionType) else []
    while left:
        code = left.pop()
        found.update(code.co_names)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(found)
