"""The portable op policy at work: entries on a device's Autocast key where its own list lacks or differs.

An entry acts where :func:`xamp.casting.active.is_portable` says that a region under this policy runs, or is recomputed
in backward; anywhere else it hands the call on, below the Autocast key, with all that it came with: what a composite
operator calls inside is cast by the device's own list as ever. In a region it casts as :mod:`xamp.casting.ops.table`
says and calls with the key excluded, as torch's own entries do, so that nothing is cast twice.

The compiler runs entries on fake tensors, where no mark of a region reaches; there the mark is a ``torch.autocast`` of
a device that nobody has, which every tracer carries along (:data:`xamp.casting.mark.SLOT`).
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NoReturn

import torch

from xamp.casting import active, recompute
from xamp.casting.compiler import keep_eager
from xamp.casting.needs import needs
from xamp.casting.ops import OpPolicy
from xamp.casting.ops.samples import operator
from xamp.casting.ops.table import RULES
from xamp.contract import Backend
from xamp.errors import StateError
from xamp.ground.version import __version__

__all__ = ["SAME", "Portable", "additions", "install"]

SAME = "same"
"""In a backend's ``op_rules``: the device needs no entry of ours here, whatever its registrations look like."""

_LOWER = (torch.float16, torch.bfloat16)
_SINGLE = (*_LOWER, torch.float32)
# Overloads without a dtype argument hand on to those that have one, as torch's entries do.
_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

_CELLS = ("gru_cell", "lstm_cell")
"""Made of products and of what is done to their results. The products are left to cast the weights, which autocast then
does once a region: a loop over time steps calls a cell many times."""

_TO: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float32: torch.Tensor.float,
}
"""Casts; each 0.4 us faster than ``Tensor.to``."""

_IsHere = Callable[[torch.Tensor], bool]
_Change = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]

# By device type: what was added, and the registration, which ends with it.
_added: dict[str, tuple[dict[str, str | None], torch.library.Library]] = {}
_lock = threading.Lock()


def autocast_key(device_type: str) -> str:
    """The name of the dispatch key on which autocast's entries for a device type are registered."""
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


def additions(device_type: str, op_rules: Mapping[str, str]) -> dict[str, str | None]:
    """What has to be registered for a device: overload -> the rule that it has natively, None where it has none.

    Args:
        device_type: of the device.
        op_rules: see :attr:`xamp.contract.Backend.op_rules`.
    """
    if device_type in _added:
        return _added[device_type][0]
    key, found = autocast_key(device_type), {}
    for overload in RULES:
        native = op_rules.get(overload)
        there = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", key)
        if native != SAME and (native is not None or not there):
            found[overload] = native
    return found


class Portable(OpPolicy):
    """One table for every device: :data:`xamp.casting.ops.table.RULES`."""

    def install(self, device_type: str, backend: Backend) -> None:
        """See :meth:`OpPolicy.install`: add the entries that the device's own list lacks."""
        install(device_type, backend.op_rules)


def install(device_type: str, op_rules: Mapping[str, str]) -> None:
    """Register what is missing on ``device_type``, once a process. Inert outside of regions under this policy."""
    with _lock:
        if device_type in _added:
            return
        library = torch.library.Library("aten", "IMPL")
        key, missing = autocast_key(device_type), additions(device_type, op_rules)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for overload, native in missing.items():
                library.impl(overload, _entry(overload, native, device_type), key, with_keyset=True)
        _added[device_type] = missing, library
        if missing:
            needs.add_extended(device_type)
            _tag_caches(device_type, missing)
        needs.ask_for_marks()
        recompute.watch()


def _tag_caches(device_type: str, missing: Mapping[str, str | None]) -> None:
    """Tell the compiler's caches on disk what is added: their keys hold what was called, and not what comes of it."""
    rules = [(overload, native, RULES[overload].kind) for overload, native in missing.items()]
    digest = hashlib.sha256(repr((__version__, rules)).encode()).hexdigest()[:12]
    config = torch.compiler.config
    if hasattr(config, "cache_key_tag"):
        config.cache_key_tag += f";xamp-{device_type}-{digest}"


def _entry(overload: str, native: str | None, device_type: str) -> Callable[..., Any]:
    """The kernel of one overload."""
    key = getattr(torch._C.DispatchKey, autocast_key(device_type))
    below, this_key = torch._C._dispatch_keyset_full_after(key), torch._C.DispatchKeySet(key)
    op = operator(overload)
    target = _handing_on(overload) if overload in _WITH_DTYPE else op
    change = _change(overload, RULES[overload].kind, device_type)
    own_change = None if native is None else _change(overload, native, device_type)
    weights_inside = overload in _CELLS
    redispatch, excluding, is_portable = op.redispatch, torch._C._ExcludeDispatchKeyGuard, active.is_portable

    def entry(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if is_portable():
            args, kwargs = change(args, kwargs)
            if weights_inside:
                return redispatch(keys & below, *args, **kwargs)
            with excluding(this_key):
                return target(*args, **kwargs)
        if own_change is None:
            return redispatch(keys & below, *args, **kwargs)
        args, kwargs = own_change(args, kwargs)
        with excluding(this_key):
            return op(*args, **kwargs)

    return keep_eager(entry)


def _handing_on(overload: str) -> Callable[..., Any]:
    """Calls ``overload``, or where a dtype is given the one that has it."""
    plain, with_dtype = operator(overload), operator(_WITH_DTYPE[overload])
    return lambda *args, **kwargs: (with_dtype if "dtype" in kwargs else plain)(*args, **kwargs)


def _change(overload: str, kind: str, device_type: str) -> _Change:
    """What a rule does to the arguments of a call."""
    is_here = _is_on(device_type)
    if kind == "fp32":
        return lambda args, kwargs: _cast(args, kwargs, torch.float32, is_here)
    if kind == "lower" and overload in _CELLS:
        return lambda args, kwargs: _cast_state(args, kwargs, torch._C.get_autocast_dtype(device_type), is_here)
    if kind == "lower":
        return lambda args, kwargs: _cast(args, kwargs, torch._C.get_autocast_dtype(device_type), is_here)
    if kind == "promote":

        def promote(args: Any, kwargs: Any) -> Any:
            lower = torch._C.get_autocast_dtype(device_type)
            dtype = _widest((*args, *kwargs.values()), lower, lower, overload, is_here)
            return _cast(args, kwargs, dtype, is_here)

        return promote
    if kind == "fp32_dtype":
        return _name_dtype(overload, is_here)
    return _refuse(overload)


def _is_on(device_type: str) -> _IsHere:
    """Whether a tensor is on a device of this type: by its own flag, 0.2 us faster than by ``device.type``."""
    if hasattr(torch.Tensor, f"is_{device_type}"):
        return attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def _cast(args: Any, kwargs: Any, dtype: torch.dtype, is_here: _IsHere) -> Any:
    """Cast what the rules speak of. The hot path of each operator that was added, hence a loop and no recursion."""
    made = []
    for value in args:
        if isinstance(value, torch.Tensor):
            given = value.dtype
            if given is not dtype and given in _SINGLE and is_here(value):
                value = _TO[dtype](value)
        elif isinstance(value, (list, tuple)):
            value = _cast(value, None, dtype, is_here)[0]
        made.append(value)
    if kwargs:
        kwargs = dict(zip(kwargs, _cast(kwargs.values(), None, dtype, is_here)[0], strict=True))
    return made, kwargs


def _cast_state(args: Any, kwargs: Any, dtype: torch.dtype, is_here: _IsHere) -> Any:
    """Cast a cell's input and state only."""
    args = [*_cast(args[:2], None, dtype, is_here)[0], *args[2:]]
    named = {name: kwargs[name] for name in ("input", "hx") if name in kwargs}
    return args, {**kwargs, **_cast((), named, dtype, is_here)[1]} if named else kwargs


def _widest(values: Any, found: torch.dtype, lower: torch.dtype, overload: str, is_here: _IsHere) -> torch.dtype:
    """fp32 where one of the tensors has it, else ``lower``; found in the order in which torch's own rule looks."""
    for value in values:
        if isinstance(value, torch.Tensor):
            given = value.dtype
            if given is torch.float32 and is_here(value):
                found = torch.float32
            elif found is lower and given not in (lower, torch.float64) and given.is_floating_point and is_here(value):
                raise StateError(
                    f"{overload}: got a tensor of {given} in a region that casts to {lower}, which autocast refuses on "
                    "every device: it promotes that dtype and fp32 only. Cast the tensor before."
                )
        elif isinstance(value, (list, tuple)):
            found = _widest(value, found, lower, overload, is_here)
    return found


def _name_dtype(overload: str, is_here: _IsHere) -> _Change:
    """Put fp32 into the ``dtype`` argument where the caller put nothing."""
    arguments = operator(overload)._schema.arguments
    hands_on = overload in _WITH_DTYPE  # to an overload without defaults, for which the dtype is not optional
    place = len(arguments) if hands_on else [argument.name for argument in arguments].index("dtype")

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None):
            return args, kwargs
        first = args[0] if args else kwargs.get("self")
        if not (isinstance(first, torch.Tensor) and first.dtype in _SINGLE and is_here(first)):
            return args, kwargs
        if hands_on:
            args, kwargs = (*args, *(kwargs.get(a.name, a.default_value) for a in arguments[len(args) :])), {}
        return args[:place], {**kwargs, "dtype": torch.float32}

    return change


def _refuse(overload: str) -> _Change:
    def refuse(*_: object) -> NoReturn:
        raise StateError(
            f"{overload}: not in a region that casts, where its gradient may not fit fp16. Leave the sigmoid before it "
            f"out and use {overload}_with_logits (BCEWithLogitsLoss), or compute the loss outside of the model."
        )

    return refuse
