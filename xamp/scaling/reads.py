"""Reads the gradient of a model's parameter where its master has it: what a ``ModelGradient`` shows.

:class:`xamp.scaling.moves.ModelGradient` loads this where somebody reads one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import StateError
from xamp.scaling.masters import master_of
from xamp.torch_compat.torch_private.autograd import current_graph_task_id

__all__ = ["class_over", "run"]


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function of torch with copies of masters' gradients, or, where it writes into an argument, with zeros.

    ``.data`` and ``detach()`` return the ``ModelGradient`` itself, which is read and written through them.
    """
    if current_graph_task_id() >= 0:  # a backward adds to the zeros, by a kernel of a device that is written in Python
        return func(*map(_zeros_of, args), **{key: _zeros_of(value) for key, value in kwargs.items()})
    name, first = func.__name__, args[0] if args else None
    if name == "__get__":
        result = func(_zeros_of(first), *args[1:])
        if not isinstance(result, torch.Tensor):
            return result  # a dtype, a device, a version, ...
    of_data = getattr(func, "__self__", None) is torch.Tensor.data
    if name == "detach" or (name == "__get__" and of_data):
        return first
    if name == "__set__" and of_data:
        return _set_data(first, args[1])
    taken = [*map(_gradient_of, args)]
    if writes := name == "__set__" or _writes(name):
        taken[0] = _zeros_of(first)
    result = func(*taken, **{key: _gradient_of(value) for key, value in kwargs.items()})
    return first if writes and result is taken[0] else result


def _set_data(grad: Any, value: torch.Tensor) -> None:
    """Run ``grad.data = value``.

    ``Module.to()`` says it with the gradient that it read, on another device or in another dtype: zeros follow it. Any
    other value is a write.
    """
    zeros, found, shown = _zeros_of(grad), _gradient_of(value), _gradient_of(grad)
    if found.is_meta or _is_same(shown.to(found.device, found.dtype), found):
        zeros.data = torch.zeros_like(found, dtype=zeros.dtype)
    else:
        zeros.detach().copy_(found)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values, nan among them: of a backward that overflowed."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _writes(name: str) -> bool:
    """Return whether a function of torch writes into its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_")


def _is_one(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "_xamp_stands")


def _zeros_of(value: Any) -> Any:
    """Return the zeros of each ``ModelGradient`` in ``value``, a tensor or a list of tensors."""
    if _is_one(value):
        return value._xamp_stands[0]
    return [*map(_zeros_of, value)] if isinstance(value, list | tuple) else value


def _gradient_of(value: Any) -> Any:
    """Return a copy of the gradient for which each ``ModelGradient`` in ``value`` stands."""
    if _is_one(value):
        found = _stands_for(value)
        return value._xamp_stands[0] if found is None else value._xamp_copy_of(found)
    return type(value)(map(_gradient_of, value)) if type(value) in (list, tuple) else value


def _stands_for(grad: Any) -> torch.Tensor | None:
    """Return the gradient of the master while ``grad`` is on its parameter; None: what was written into it counts."""
    zeros, ref, owner_of, version = grad._xamp_stands
    param = ref()
    if zeros._version != version:
        return None
    if param is None or param.grad is not grad:
        raise StateError(
            "grad: this was the .grad of a parameter of the model, which showed the gradient of its fp32 master, and "
            "it has been cleared since. Keep a copy: param.grad.clone()."
        )
    owner, master = owner_of(), master_of(param)
    if owner is not None and owner.held is not None:
        held: torch.Tensor | None = owner.held.gradient_of(param)  # a copy
        return held
    if owner is not None and owner.one_pass is not None and master is not None and master.grad is None:
        raise StateError(
            "grad: the gradient of this parameter was in its fp32 master and is there no more: no backward reached it, "
            "or the step in one pass has used it up. Read it before optimizer.step()."
        )
    return None if master is None else master.grad


@functools.cache
def class_over(kind: type, base: type) -> type:
    """Return the class, derived from ``base``, for zeros of class ``kind``: DTensors, which have own methods."""
    own = {name: _reading(name) for name, found in vars(kind).items() if inspect.isfunction(found) and name[0] != "_"}
    return type(kind.__name__, (base, kind), own)


def _reading(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(_gradient_of(self), name)(*args, **kwargs)
