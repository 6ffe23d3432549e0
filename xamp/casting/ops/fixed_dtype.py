"""Entries for operators that a device's own autocast casts to one dtype, whatever the dtype of the region.

A backend names them in its ``op_rules``, with that dtype as their rule. In xamp's regions, under the portable and the
native policy alike, an entry casts to the region's dtype. Then it calls the operator with the Autocast key excluded, so
that nothing inside is cast again. In a region of that very dtype, and outside of xamp's regions, the device's own
autocast does as it does without xamp.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xamp.casting import active, recompute
from xamp.casting.features_in_use import needs
from xamp.casting.ops import OpPolicy
from xamp.casting.ops.layers import layer_caster, serve
from xamp.casting.ops.parts import (
    HERE,
    CastArguments,
    autocast_key,
    cast_all,
    device_test,
    has_entry,
    operator,
    python_function,
)
from xamp.casting.ops.table import LAYERS
from xamp.contract import Backend
from xamp.torch_compat import cache_keys
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private import dispatch
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype
from xamp.values.version import __version__

__all__ = ["OwnList", "added", "fixed", "install"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# By device type: the overloads that the device's own list lacks, and the torch library that holds the entries.
_added: dict[str, tuple[frozenset[str], torch.library.Library]] = {}
_lock = threading.RLock()  # an interrupt may leave it held: this thread can go on


class OwnList(OpPolicy):
    """The policy ``"native"``: the device's own list, but in the region's dtype where that list has another."""

    def install(self, device_type: str, backend: Backend) -> None:
        """See :meth:`OpPolicy.install`."""
        serve(device_type, backend)
        install(device_type, backend.op_rules)


def fixed(op_rules: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Return the overloads that a device casts to one dtype, each with that dtype.

    Args:
        op_rules: see :attr:`xamp.contract.Backend.op_rules`.
    """
    ours = {name: _DTYPES[rule] for name, rule in op_rules.items() if rule in _DTYPES}
    return {name: dtype for name, dtype in ours.items() if name in HERE and HERE[name].kind == "lower"}


def added(device_type: str) -> frozenset[str]:
    """Return the overloads of which a device has no entry but xamp's."""
    return _added[device_type][0] if device_type in _added else frozenset()


def install(device_type: str, op_rules: Mapping[str, str]) -> None:
    """Register the entries on ``device_type``, once per process. They act only in xamp's regions.

    Rules that ask for none leave nothing behind: others may follow, of another backend or of who only reads them.
    """
    found = fixed(op_rules)
    if not found or device_type in _added:
        return
    with _lock:
        if device_type in _added:
            return
        library = torch.library.Library("aten", "IMPL")
        key = autocast_key(device_type)
        lacked = frozenset(overload for overload in found if not has_entry(overload, key))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for overload, own in found.items():
                dispatch.put_kernel(library, overload, _entry(overload, own, device_type), key, with_keyset=True)
        digest = hashlib.sha256(repr((__version__, sorted(op_rules.items()))).encode()).hexdigest()[:12]
        cache_keys.put(f"{device_type}dtype", digest)
        needs.own_dtypes = {**needs.own_dtypes, device_type: frozenset(found.values())}
        needs.marks = True
        recompute.watch()
        _added[device_type] = lacked, library  # last: after an interrupt before, all is done again


def _entry(overload: str, own: torch.dtype, device_type: str) -> Callable[..., Any]:
    """Make the entry of an overload that the device casts to ``own``, by an entry of its own or further inside."""
    key = getattr(torch.DispatchKey, autocast_key(device_type))
    below = dispatch.keyset_full_after(key)
    cast_inside = not has_entry(overload, autocast_key(device_type))
    to_region, to_own = _lowering(overload, None, device_type), _lowering(overload, own, device_type)
    target, redispatch = python_function(overload) or operator(overload), operator(overload).redispatch
    get_dtype, casts_on = get_autocast_dtype, active.casts_on
    exclude = dispatch.set_key_excluded

    def entry(keys: Any, *args: Any, **kwargs: Any) -> Any:
        ours = get_dtype(device_type) is not own and casts_on(device_type)
        if cast_inside and not ours:
            return redispatch(keys & below, *args, **kwargs)
        args, kwargs = (to_region if ours else to_own)(args, kwargs)
        try:
            exclude(key, True)
            return target(*args, **kwargs)
        finally:
            exclude(key, False)

    return keep_eager(entry)


def _lowering(overload: str, dtype: torch.dtype | None, device_type: str) -> CastArguments:
    """Return the function that casts the arguments of a call to ``dtype``, None: that of the region."""
    if dtype is None and overload in LAYERS:
        return layer_caster(overload, device_type)
    on_device = device_test(device_type)
    return lambda args, kwargs: cast_all(args, kwargs, dtype or get_autocast_dtype(device_type), on_device)
