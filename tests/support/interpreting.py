"""Triton's interpreter, in half its time: what it finds out anew at each call of a function is kept.

Before Triton 3.7 it makes an integer of an array of one element as numpy 2.4 refuses to; here it asks for the element.

At each launch it looks through Triton's language for what it replaces, and at each call of a function within a kernel
again, where all is replaced already. What is replaced, and when, stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import on_import

__all__ = ["install"]

_NEEDED = ("_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang")


def install() -> None:
    """Change the interpreter, now or when it is imported; again it does nothing. Another Triton's is left alone."""
    on_import.change(_CHANGES)


def _change(module: Any) -> None:
    if hasattr(module, "_kept"):
        return
    module._kept = True
    module._patch_lang_tensor = _by_element(module._patch_lang_tensor)
    if (
        not all(hasattr(module, name) for name in _NEEDED)
        or len(inspect.signature(module._patch_builtin).parameters) != 3
    ):
        return
    module._patch_builtin = _by_list(module)
    module._patch_lang = _once_a_launch(module)
    module._get_np_dtype = _by_name(module)


def _by_element(own: Callable[..., None]) -> Callable[..., None]:
    """Return ``_patch_lang_tensor`` that lets a tensor of one element be an index; what undoes the rest undoes it."""

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        own(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patch_lang_tensor


def _by_list(module: Any) -> Callable[[Any, Any, Any], None]:
    """Return ``_patch_builtin`` that keeps the list of a package's functions. It is asked where none is replaced."""
    lists: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in lists:
            members = inspect.getmembers(package)
            lists[package] = [(name, member) for name, member in members if module.tl.core.is_builtin(member)]
        for name, member in lists[package]:
            module._patch_attr(package, name, member, builder, scope)

    return patch_builtin


def _once_a_launch(module: Any) -> Callable[[FunctionType], Any]:
    """Return ``_patch_lang`` that replaces nothing where the launch that runs has replaced it."""
    own, replaced = module._patch_lang, set[str]()
    seen: dict[FunctionType, set[str]] = {}

    def languages(function: FunctionType) -> set[str]:
        if function not in seen:
            values = function.__globals__.values()
            seen[function] = {each.__name__ for each in (module.tl, module.tl.core) if any(v is each for v in values)}
        return seen[function]

    def patch_lang(function: FunctionType) -> Any:
        needed = languages(function)
        if replaced and needed <= replaced:
            return module._LangPatchScope()
        scope = own(function)
        if replaced:
            return scope
        replaced.update(needed)
        restore = scope.restore

        def restored() -> None:
            replaced.clear()
            restore()

        scope.restore = restored
        return scope

    return patch_lang


def _by_name(module: Any) -> Callable[[Any], Any]:
    """Return ``_get_np_dtype`` that makes its table of types once for each type."""
    own, found = module._get_np_dtype, {}

    def get_np_dtype(kind: Any) -> Any:
        if type(kind) is not module.tl.dtype:
            return own(kind)
        if kind.name not in found:
            found[kind.name] = own(kind)
        return found[kind.name]

    return get_np_dtype


_CHANGES = {"triton.runtime.interpreter": _change}
