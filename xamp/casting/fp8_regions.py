"""Regions in which linear layers run in fp8: how code knows the recipe, and the entries that follow it.

An entry of a device's autocast for ``linear``, and one for ``addmm`` (as the Conv1D of transformers calls it), takes
the place of torch's own. In a region with a recipe it runs :mod:`xamp.casting.fp8_linear`, if shapes and dtypes allow.
Everywhere else it calls torch's entry, so that nobody else's results change.

The recipe of a region is part of the autocast state, as the slot is (:mod:`xamp.casting.region_mark`): two device types
that nobody has hold two bits of it. So the compiler's guards see it, and the entries that it runs on fake tensors. The
keys of the compiler's caches on disk hold it too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xamp.casting import active, ops, recompute
from xamp.casting.features_in_use import needs
from xamp.casting.fp8_linear import How, linear
from xamp.casting.ops.parts import SINGLE, autocast_key, cast_all, device_test, operator
from xamp.casting.region_mark import PORTABLE, REPLACED, SLOT
from xamp.contract import Backend
from xamp.errors import UnsupportedPolicy
from xamp.torch_compat import cache_keys, scaled
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_features import finds_kernels
from xamp.torch_compat.torch_private import autocast, dispatch
from xamp.torch_compat.torch_private.autograd import current_graph_task_id
from xamp.torch_compat.torch_private.turns import take_turns
from xamp.values.recipes import RECIPES
from xamp.values.version import __version__

__all__ = ["BITS", "CODES", "State", "available", "begin", "install", "recipe_here"]

BITS = ("maia", "mtia")
"""Device types whose autocast state, by their dtypes, holds the recipe."""

CODES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "tensorwise": (PORTABLE, None),
    "rowwise": (REPLACED, None),
    "rowwise_gw_hp": (None, PORTABLE),
    "mxfp8": (None, REPLACED),
}
"""By recipe: the dtypes of :data:`BITS`, of the two that a ``torch.autocast`` takes; None: off."""
_NAMES = {code: name for name, code in CODES.items()}


class State:
    """Reads and writes the recipe in the autocast state of a thread; :attr:`xamp.casting.features_in_use.Needs.fp8`.

    The slot of a region with a recipe is a tuple: the dtype of :data:`xamp.casting.region_mark.SLOT`, and those of
    :data:`BITS`. There is one tuple for each, so that regions compare them by identity.
    """

    def __init__(self) -> None:
        self._slots = {
            (plain, recipe): (plain, *code) for recipe, code in CODES.items() for plain in (None, PORTABLE, REPLACED)
        }
        self._tagged = ""

    def slot_of(self, recipe: str, plain: torch.dtype | None) -> Any:
        """Return the slot of a region with ``recipe`` whose slot is ``plain`` without it."""
        return self._slots[plain, recipe]

    def recipe(self) -> str | None:
        """Return the recipe of the region that has set this thread's state; None: it has none."""
        first, second = BITS
        code = _dtype_of(first), _dtype_of(second)
        return None if code == (None, None) else _NAMES[code]

    def read(self, plain: torch.dtype | None) -> Any:
        """Return the slot that holds here, of which ``plain`` is the dtype of the first device type."""
        recipe = self.recipe()
        return plain if recipe is None else self._slots[plain, recipe]

    def parts(self, slot: Any) -> Any:
        """Return the arguments of three ``torch.autocast`` that set ``slot``, and the recipe in it, in traced code."""
        plain, first, second = slot if isinstance(slot, tuple) else (slot, None, None)
        return (
            (SLOT, plain or PORTABLE, plain is not None),
            (BITS[0], first or PORTABLE, first is not None),
            (BITS[1], second or PORTABLE, second is not None),
        )

    def write(self, slot: Any) -> Any:
        """Set the recipe of ``slot``, and return what is left of it: the dtype of the first device type, or None."""
        plain, *code = slot if isinstance(slot, tuple) else (slot, None, None)
        for device, dtype in zip(BITS, code, strict=True):
            autocast.set_autocast_enabled(device, dtype is not None)
            autocast.set_autocast_dtype(device, dtype or PORTABLE)
        name = _NAMES.get((code[0], code[1]), "")
        if name != self._tagged:
            self._tagged = name
            cache_keys.put("fp8", name)
        return plain


@keep_eager
def recipe_here() -> str | None:
    """Return the recipe by which linear layers run in fp8 here, also where backward recomputes them; None: none."""
    found: str | None = needs.fp8.recipe()
    if found is not None:
        active.innermost()  # notes that somebody asked: recomputation may ask again
    elif current_graph_task_id() >= 0:
        mark, _ = active.snapshot()
        found = None if mark is None else mark.fp8
    return found


def _dtype_of(device: str) -> torch.dtype | None:
    return autocast.get_autocast_dtype(device) if autocast.is_autocast_enabled(device) else None


def available(recipe: str, backend: Backend, device: torch.device, call: str = "initialize") -> str:
    """Return the name of a recipe that ``device`` runs or rehearses, for ``"auto"`` the fastest.

    Raises:
        UnsupportedPolicy: it has none, or not this one.
    """
    can = backend.capabilities(device)
    there = tuple(dict.fromkeys((*can.fp8, *can.fp8_rehearsed)))
    if recipe in there:
        return recipe
    if recipe == "auto" and there:
        return there[0]
    cure = f"Choose one of these, or fp8='auto' for {there[0]!r}" if there else "Leave fp8 out, or use level 'O4'"
    raise UnsupportedPolicy(
        f"{call}(fp8={recipe!r}): backend {backend.name!r} cannot run it on {device}. Recipes of fp8 there: "
        f"{', '.join(there) or 'none'}. {cure}."
    )


def begin(recipe: str, backend: Backend, device: torch.device) -> str:
    """Return what :func:`available` does for ``xamp.autocast``, and prepare regions on ``device``."""
    found = available(recipe, backend, device, "autocast")
    install(device.type, backend)
    return found


# --- the entries

# By device type: the backend that casts and multiplies, and the torch library that holds the entries.
_serving: dict[str, Backend] = {}
_added: dict[str, torch.library.Library] = {}
_lock = threading.RLock()  # an interrupt may leave it held: this thread can go on


def install(device_type: str, backend: Backend) -> None:
    """Prepare regions with a recipe on ``device_type``: entries once a process, and the backend that serves them."""
    if needs.fp8 is None:
        needs.fp8 = State()
    _serving[device_type] = backend
    if device_type in _added:
        return
    ops.named("portable").install(device_type, backend)  # or it would take these entries for the device's own
    with _lock:
        if device_type in _added:
            return
        scaled.tried(torch.device(device_type), backend.fp8_formats)
        library, key = torch.library.Library("aten", "IMPL"), autocast_key(device_type)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for overload, layer in _LAYERS.items():
                entry = _entry(layer, device_type, _elsewhere(overload, device_type))
                dispatch.put_kernel(library, overload, entry, key, with_keyset=True)
        cache_keys.put(f"{device_type}fp8", f"{__version__}-{backend.name}")
        needs.marks = True
        recompute.watch()
        _added[device_type] = library  # last: after an interrupt before, all is done again


class _Layer(NamedTuple):
    """A call that is a linear layer: its input, its weight (out, in) and its bias."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def _of_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Layer | None:
    return _Layer(input, weight, bias) if weight.dim() == 2 and input.dim() else None


def _of_addmm(bias: Any, input: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> _Layer | None:
    """Tell a layer by its bias, of which :func:`_fits` asks one value for each output. Other sums are none."""
    return _Layer(input, weight.t(), bias) if beta == alpha == 1 else None


_LAYERS: dict[str, Callable[..., _Layer | None]] = {"linear": _of_linear, "addmm": _of_addmm}


def _entry(layer_of: Callable[..., _Layer | None], device_type: str, elsewhere: Callable[..., Any]) -> Any:
    """Make the entry of an overload; ``elsewhere`` does what the device does without it."""
    on_device = device_test(device_type)

    def entry(keys: Any, *args: Any, **kwargs: Any) -> Any:
        name = recipe_here()
        if name is not None:
            layer, recipe = layer_of(*args, **kwargs), RECIPES[name]
            dtype = autocast.get_autocast_dtype(device_type)
            if layer is not None and dtype is torch.bfloat16 and _fits(layer, recipe.multiple, on_device):
                return linear(*layer, How(recipe, _serving[device_type], dtype))
        return elsewhere(keys, *args, **kwargs)

    return keep_eager(entry)


def _fits(layer: _Layer, multiple: int, on_device: Callable[[torch.Tensor], bool]) -> bool:
    """Whether a layer can run in fp8: dense tensors on the device, in a dtype that is cast, of fitting dimensions."""
    for each in layer:
        if each is not None and (each.dtype not in SINGLE or not on_device(each) or _is_distributed(each)):
            return False
    outputs, inputs = layer.weight.shape
    if layer.bias is not None and layer.bias.shape != (outputs,):
        return False
    return outputs * inputs > 0 and outputs % multiple == inputs % multiple == 0


def _is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _elsewhere(overload: str, device_type: str) -> Callable[..., Any]:
    """Return what calls the device's own entry with the keys of a call first.

    From Python that keeps the interpreter's lock while it waits for the lock of torch's cache of casts, which a thread
    that leaves a region holds while it waits for the interpreter's: so the two take turns.
    """
    key = autocast_key(device_type)
    if finds_kernels():
        own = torch.library.get_kernel(f"aten::{overload}", key).call_boxed
        turn = take_turns()

        def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
            with turn:
                return own(keys, *args, **kwargs)

        return call
    target, on_device = operator(overload), device_test(device_type)
    autocast_of = getattr(torch.DispatchKey, key)

    def cast_and_call(_: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_all(args, kwargs, autocast.get_autocast_dtype(device_type), on_device)
        try:
            dispatch.set_key_excluded(autocast_of, True)
            return target(*args, **kwargs)
        finally:
            dispatch.set_key_excluded(autocast_of, False)

    return cast_and_call
