"""Applies the portable op policy: adds entries to a device's Autocast key where its list lacks a rule or has another.

In a region under this policy, and where backward recomputes one (:func:`xamp.casting.active.read_portable`), an entry
casts the arguments as :mod:`xamp.casting.ops.table` says. Then it calls the operator with the Autocast key excluded, as
torch's own entries do, so that nothing is cast twice. It calls the function of ``torch._C`` that Python calls too: the
overload's own object takes 2 to 6 us more to find out what its arguments are.

Anywhere else, an entry follows the device's own rule for the overload. If there is none, it passes the call on
unchanged, to the keys below Autocast. The device's own list then still casts the operators that a composite operator
calls inside. The operators of :data:`CALLS_NONE` call none that it would cast, and are called with the Autocast key
excluded too, which takes half the time.

The compiler runs entries on fake tensors, and the mark of a region does not reach them there. They read the slot
instead, a ``torch.autocast`` state that every tracer keeps (:data:`xamp.casting.region_mark.SLOT`).
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from xamp.casting import active, recompute
from xamp.casting.features_in_use import needs
from xamp.casting.ops import OpPolicy, fixed_dtype
from xamp.casting.ops.layers import layer_caster, serve
from xamp.casting.ops.parts import (
    EVERY,
    HERE,
    LOWER,
    SINGLE,
    CastArguments,
    IsOnDevice,
    autocast_key,
    cast_all,
    device_test,
    exists,
    has_entry,
    operator,
    python_function,
)
from xamp.casting.ops.table import LAYERS, UNLISTED
from xamp.contract import Backend
from xamp.errors import StateError
from xamp.torch_compat import cache_keys
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private import dispatch
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype
from xamp.values.containers import TO
from xamp.values.version import __version__

__all__ = ["CALLS_NONE", "SAME", "Portable", "additions", "install"]

SAME = "same"
"""In a backend's ``op_rules``: the device needs no entry for this overload, whether or not it has registered one."""

# For an overload without a dtype argument, the overload with one is called instead, as torch's entries do.
_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

CALLS_NONE = {
    "group_norm": "native_group_norm",
    "layer_norm": "native_layer_norm",
    "log_softmax.int": "_log_softmax",
    "softmax.int": "_softmax",
}
"""Operators of most models that do nothing but call one other operator: which one."""

_CELLS = ("gru_cell", "lstm_cell")
"""Operators that call matrix products and work on the results. Their entries leave the weights alone: the products cast
them, and autocast caches the casts for the region. A loop over time steps calls a cell many times."""


# By device type: the added entries, and the torch library that holds them registered as long as it lives.
_added: dict[str, tuple[dict[str, str | None], torch.library.Library]] = {}
_lock = threading.RLock()  # an interrupt may leave it held: this thread can go on


def additions(device_type: str, op_rules: Mapping[str, str]) -> dict[str, str | None]:
    """Return the overloads that need an entry on a device, each with the device's own rule for it; None: it has none.

    Args:
        device_type: the type of the device.
        op_rules: see :attr:`xamp.contract.Backend.op_rules`.
    """
    if device_type in _added:
        return _added[device_type][0]
    key, found, fixed = autocast_key(device_type), {}, fixed_dtype.fixed(op_rules)
    for overload in (*HERE, *filter(exists, UNLISTED)):
        native = op_rules.get(overload)
        if native != SAME and overload not in fixed and (native is not None or not has_entry(overload, key)):
            found[overload] = native
    return found


def _has_own_kernel(inner: str, device_type: str) -> bool:
    """Whether a device has a kernel of its own for ``inner``, which else calls others, and no rule of its own."""
    kernels = dispatch.key_for_device(device_type)
    return dispatch.has_kernel_for_key(f"aten::{inner}", kernels) and not has_entry(inner, autocast_key(device_type))


class Portable(OpPolicy):
    """The policy with one table for all devices: :data:`xamp.casting.ops.table.RULES`."""

    def install(self, device_type: str, backend: Backend) -> None:
        """Add the entries that the device's own list lacks; see :meth:`OpPolicy.install`."""
        serve(device_type, backend)
        install(device_type, backend.op_rules)


def install(device_type: str, op_rules: Mapping[str, str]) -> None:
    """Register the missing entries on ``device_type``, once per process. They act only in regions of this policy."""
    if device_type in _added:
        return
    fixed_dtype.install(device_type, op_rules)
    with _lock:
        if device_type in _added:
            return
        library = torch.library.Library("aten", "IMPL")
        key, missing = autocast_key(device_type), additions(device_type, op_rules)
        whole = {name for name, inner in CALLS_NONE.items() if _has_own_kernel(inner, device_type)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for overload, native in missing.items():
                passes = overload in _CELLS or (native is None and overload not in whole)
                make = _passing_entry if passes else _entry
                dispatch.put_kernel(library, overload, make(overload, native, device_type), key, passes)
        if missing:
            needs.extended |= {device_type}
            _tag_caches(device_type, missing)
        needs.marks = True
        recompute.watch()
        _added[device_type] = missing, library  # last: after an interrupt before, all is done again


def _tag_caches(device_type: str, missing: Mapping[str, str | None]) -> None:
    """Add the entries to the keys of the compiler's disk caches: the keys hold the called operators, but no casts."""
    rules = [(overload, native, EVERY[overload].kind) for overload, native in missing.items()]
    digest = hashlib.sha256(repr((__version__, rules)).encode()).hexdigest()[:12]
    cache_keys.put(device_type, digest)


def _entry(overload: str, native: str | None, device_type: str) -> Callable[..., Any]:
    """Make the entry of an overload that the device has a rule for, or that calls nothing which it has a rule for."""
    key = getattr(torch.DispatchKey, autocast_key(device_type))
    target = _target(overload)
    cast_portably = _rule_caster(overload, EVERY[overload].kind, device_type)
    cast_natively = None if native is None else _rule_caster(overload, native, device_type)
    read_portable = active.read_portable
    # Two calls cost 1 us less than torch's guard as a context manager, 2 to 4 where other operators emptied the caches.
    # An entry runs only where its key is not excluded, so it need not ask before.
    exclude = dispatch.set_key_excluded

    def entry(*args: Any, **kwargs: Any) -> Any:
        cast = cast_portably if read_portable() else cast_natively
        if cast is not None:
            args, kwargs = cast(args, kwargs)
        try:
            exclude(key, True)
            if cast is not None:
                return target(*args, **kwargs)
            with torch.DisableTorchFunction():  # who calls from C++ is not seen by modes and subclasses
                return target(*args, **kwargs)
        finally:
            exclude(key, False)

    return keep_eager(entry)


def _passing_entry(overload: str, native: str | None, device_type: str) -> Callable[..., Any]:
    """Make the entry of a cell, or of an overload without a rule of the device that may call operators which have one.

    torch makes the first argument, the keys of the dispatcher, for each call: 2 us where other operators emptied the
    caches.
    """
    key = getattr(torch.DispatchKey, autocast_key(device_type))
    below = dispatch.keyset_full_after(key)
    target = _target(overload)
    cast_portably = _rule_caster(overload, EVERY[overload].kind, device_type)
    cast_natively = None if native is None else _rule_caster(overload, native, device_type)
    redispatch, read_portable = operator(overload).redispatch, active.read_portable
    # A rule that lowers a cell leaves its weights to the products inside, which must see the key.
    lowering = (cast_portably, cast_natively if native == "lower" else None) if overload in _CELLS else ()
    exclude = dispatch.set_key_excluded

    def entry(keys: Any, *args: Any, **kwargs: Any) -> Any:
        cast = cast_portably if read_portable() else cast_natively
        if cast is not None:
            args, kwargs = cast(args, kwargs)
        if cast is None or cast in lowering:
            return redispatch(keys & below, *args, **kwargs)
        try:
            exclude(key, True)
            return target(*args, **kwargs)
        finally:
            exclude(key, False)

    return keep_eager(entry)


def _target(overload: str) -> Callable[..., Any]:
    """Return what calls ``overload`` with the arguments that an entry has cast."""
    if overload in _WITH_DTYPE:
        return _dtype_variant(overload)
    return python_function(overload) or operator(overload)


def _dtype_variant(overload: str) -> Callable[..., Any]:
    """Return a function that calls ``overload``, or its variant with a ``dtype`` argument if that is passed."""
    alone, with_dtype = operator(overload), operator(_WITH_DTYPE[overload])
    return lambda *args, **kwargs: (with_dtype if "dtype" in kwargs else alone)(*args, **kwargs)


def _rule_caster(overload: str, kind: str, device_type: str) -> CastArguments:
    """Return the function that applies a rule to the arguments of a call."""
    on_device = device_test(device_type)
    places = _places(overload)
    if kind == "fp32":
        if places is not None:
            return _fp32_caster(places, on_device)
        return lambda args, kwargs: cast_all(args, kwargs, torch.float32, on_device)
    if kind == "lower" and overload in _CELLS:
        return lambda args, kwargs: _cast_state(args, kwargs, get_autocast_dtype(device_type), on_device)
    if kind == "lower" and overload in LAYERS:
        return layer_caster(overload, device_type)
    if kind == "lower":
        return lambda args, kwargs: cast_all(args, kwargs, get_autocast_dtype(device_type), on_device)
    if kind == "promote":

        def promote(args: Any, kwargs: Any) -> Any:
            lower = get_autocast_dtype(device_type)
            dtype = _widest((*args, *kwargs.values()), lower, lower, overload, on_device)
            return cast_all(args, kwargs, dtype, on_device)

        return promote
    if kind == "fp32_dtype":
        return _dtype_setter(overload, on_device)
    return _refuse(overload)


def _places(overload: str) -> tuple[int, ...] | None:
    """Return where the tensors of ``overload`` stand; None where some are in lists or are given by name."""
    found = []
    for place, argument in enumerate(operator(overload)._schema.arguments):
        if "Tensor" in str(argument.type):
            if argument.kwarg_only or "List" in str(argument.type):
                return None
            found.append(place)
    return tuple(found)


def _fp32_caster(places: tuple[int, ...], on_device: IsOnDevice) -> CastArguments:
    """Return a function that casts what stands at ``places`` to fp32. Mostly all is fp32 already: that must be fast."""
    single, to = torch.float32, TO[torch.float32]

    def cast(args: Any, kwargs: Any) -> Any:
        made = None
        for place in places:
            if place >= len(args):  # the rest was left out
                break
            value = args[place]
            if value is not None and value.dtype is not single and value.dtype in LOWER and on_device(value):
                if made is None:
                    made = list(args)
                made[place] = to(value)
        return (args if made is None else made), kwargs

    return cast


def _cast_state(args: Any, kwargs: Any, dtype: torch.dtype, on_device: IsOnDevice) -> Any:
    """Cast only the input and the state of a cell."""
    args = [*cast_all(args[:2], None, dtype, on_device)[0], *args[2:]]
    named = {name: kwargs[name] for name in ("input", "hx") if name in kwargs}
    return args, {**kwargs, **cast_all((), named, dtype, on_device)[1]} if named else kwargs


def _widest(values: Any, found: torch.dtype, lower: torch.dtype, overload: str, on_device: IsOnDevice) -> torch.dtype:
    """Return fp32 if one of the tensors is fp32, else ``lower``. Tensors are tested in the order of torch's rule."""
    for value in values:
        if isinstance(value, torch.Tensor):
            given = value.dtype
            if given is torch.float32 and on_device(value):
                found = torch.float32
            elif (
                found is lower and given not in (lower, torch.float64) and given.is_floating_point and on_device(value)
            ):
                raise StateError(
                    f"{overload}: got a tensor of {given} in a region that casts to {lower}, which autocast refuses on "
                    "every device: it promotes that dtype and fp32 only. Cast the tensor before."
                )
        elif isinstance(value, (list, tuple)):
            found = _widest(value, found, lower, overload, on_device)
    return found


def _dtype_setter(overload: str, on_device: IsOnDevice) -> CastArguments:
    """Return a function that sets the ``dtype`` argument to fp32 if the caller left it out."""
    arguments = operator(overload)._schema.arguments
    needs_variant = overload in _WITH_DTYPE  # that overload has no defaults, and its dtype is not optional
    place = len(arguments) if needs_variant else [argument.name for argument in arguments].index("dtype")

    def set_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None):
            return args, kwargs
        first = args[0] if args else kwargs.get("self")
        if not (isinstance(first, torch.Tensor) and first.dtype in SINGLE and on_device(first)):
            return args, kwargs
        if needs_variant:
            args, kwargs = (*args, *(kwargs.get(a.name, a.default_value) for a in arguments[len(args) :])), {}
        return args[:place], {**kwargs, "dtype": torch.float32}

    return set_dtype


def _refuse(overload: str) -> CastArguments:
    def refuse(*_: object) -> NoReturn:
        raise StateError(
            f"{overload}: not in a region that casts, where its gradient may not fit fp16. Leave the sigmoid before it "
            f"out and use {overload}_with_logits (BCEWithLogitsLoss), or compute the loss outside of the model."
        )

    return refuse
