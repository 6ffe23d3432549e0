"""Replaces listed functions by wrappers (monkey-patching) while a handle or a session needs them, then restores them.

A process has one set of patches. Each handle of ``init``, and each session whose regions cast by Apex's lists, holds a
:class:`Wanted`. The first :func:`hold` replaces the functions; the last :func:`release` restores every attribute. Each
attribute gets one wrapper around torch's own function, however many ask for it. So nothing is wrapped twice, and the
handles may end in any order. At each call the wrapper asks :mod:`xamp.apex._casts` how to cast.

This module also clears what could remember old functions, or results of them: the caches of torch.overrides,
TorchScript's table, the compiler's tables and compiled functions, and the keys of the compiler's caches on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional

from xamp.apex._casts import process
from xamp.apex._lists import CELLS, LISTS, RNNS, in_place
from xamp.apex._wrappers import CHECK_INPUT, check_input_wrapper, make_wrapper
from xamp.casting.features_in_use import needs
from xamp.casting.script import forget_script, tell_script
from xamp.torch_compat import cache_keys
from xamp.torch_compat.compiler import forget_graphs
from xamp.torch_compat.torch_private import dynamo
from xamp.torch_compat.torch_private.modules import RECURRENT
from xamp.values.version import __version__

__all__ = ["Registration", "Wanted", "held", "hold", "is_installed", "release", "tag_caches"]

_ABSENT = object()

Registration = tuple[Any, str, str]
"""A function that a user registered: module, name, and ``"half"``, ``"bfloat16"``, ``"float"`` or ``"promote"``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Wanted:
    """What one handle or session needs to be patched, besides the functions of Apex's lists.

    Attributes:
        registrations: the functions that the user registered.
        user_cast_preferred: cast a function that the user registered as registered only, and not as listed too.
        wide: see :class:`xamp.apex._casts.Casting`.
        tag: a text that identifies the casts, for the keys of the compiler's caches.
    """

    registrations: tuple[Registration, ...] = ()
    user_cast_preferred: bool = False
    wide: bool = False
    tag: str = ""


@dataclasses.dataclass
class _Place:
    """An attribute to replace, and its wrapper: ``kinds``, ``message`` and ``wide`` are those of ``make_wrapper``."""

    owner: Any
    name: str
    kinds: tuple[str, ...] = ()
    message: str = ""
    wide: bool = False


class _Patch:
    """One function that was replaced."""

    def __init__(self, place: _Place) -> None:
        self.place, owner, name = place, place.owner, place.name
        # The owner's own attribute, not one that a class inherits or that a module's __getattr__ finds.
        self._before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        self.original: Any = getattr(owner, name)
        self._descriptor: Any = None
        if isinstance(owner, type):
            raw = inspect.getattr_static(owner, name)
            if isinstance(raw, (staticmethod, classmethod)):
                self.original, self._descriptor = raw.__func__, type(raw)
            elif isinstance(raw, types.ClassMethodDescriptorType):
                self._descriptor = staticmethod
        self.made: Any = None

    def install(self, place: _Place) -> None:
        """Replace the function by a wrapper, or an earlier wrapper by one of other kinds."""
        before, self.place = self.made, place
        maker = check_input_wrapper if place.kinds == (CHECK_INPUT,) else None
        if maker is not None:
            self.made = maker(self.original)
        else:
            self.made = make_wrapper(self.original, place.name, place.kinds, place.message, wide=place.wide)
        owner = place.owner
        module = getattr(owner, "__module__" if isinstance(owner, type) else "__name__", None)
        if isinstance(module, str):
            # A pickle stores the module and the name of a function; so it loads whatever the reader has there.
            self.made.__module__ = module
            self.made.__qualname__ = f"{owner.__qualname__}.{place.name}" if isinstance(owner, type) else place.name
        tell_script(self.original, self.made)
        setattr(owner, place.name, self.made if self._descriptor is None else self._descriptor(self.made))
        if before is not None:
            forget_script(before)

    def remove(self) -> None:
        """Restore the function, unless other code has replaced the wrapper since."""
        owner, name = self.place.owner, self.place.name
        found = vars(owner).get(name) if hasattr(owner, "__dict__") else getattr(owner, name, None)
        if found is self.made or (self._descriptor is not None and getattr(found, "__func__", None) is self.made):
            if self._before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, self._before)
        forget_script(self.made)


_wanted: list[Wanted] = []
_patches: dict[tuple[int, str], _Patch] = {}
_lock = threading.RLock()


def is_installed() -> bool:
    """Whether functions are replaced now."""
    return bool(_patches)


def held() -> list[Wanted]:
    """What is held now, in the order of :func:`hold`."""
    with _lock:
        return list(_wanted)


def hold(wanted: Wanted) -> None:
    """Replace the functions until :func:`release`.

    Raises:
        AttributeError, TypeError: a registered function cannot be replaced in its module; this call replaces nothing.
    """
    with _lock:
        if not _wanted:
            _prepare_compiler()
        _wanted.append(wanted)
        try:
            _apply()
        except BaseException:
            release(wanted)
            raise


def release(wanted: Wanted) -> None:
    """End one :func:`hold`. The last one restores every function."""
    with _lock:
        if wanted in _wanted:
            _wanted.remove(wanted)
            _apply()


def _apply() -> None:
    """Install, change and remove wrappers so that they are those of the plan."""
    plan = _plan() if _wanted else {}
    for key in [key for key in reversed(_patches) if key not in plan]:
        _patches.pop(key).remove()
    for key, place in plan.items():
        patch = _patches.get(key)
        if patch is None:
            patch = _Patch(place)
            patch.install(place)
            _patches[key] = patch
        elif patch.place != place:
            patch.install(place)
    needs.replaced_outside = bool(_wanted)
    needs.marks = needs.marks or needs.replaced_outside
    _clear_caches()


# ---------------------------------------------------------------- the plan: attributes to replace


def _plan() -> dict[tuple[int, str], _Place]:
    """Every attribute that needs a wrapper, by owner and name."""
    found: dict[tuple[int, str], _Place] = {}
    wide = any(wanted.wide for wanted in _wanted)
    # The class of tensors while a graph is lowered: it has methods of its own with the same names.
    functional = dynamo.functional_tensor() or types.SimpleNamespace()

    def add(owner: Any, name: str, kind: str, message: str = "") -> None:
        if not hasattr(owner, name):
            return
        place = found.setdefault((id(owner), name), _Place(owner, name, wide=wide))
        if kind not in place.kinds:  # the wrapper of the list that is read later is the outer one
            place.kinds, place.message = (kind, *place.kinds), message or place.message
        if owner is torch.Tensor and name in vars(functional):
            add(functional, name, kind, message)

    preferred = set()
    for wanted in _wanted:
        for owner, name, kind in wanted.registrations:
            add(owner, name, kind)
            if wanted.user_cast_preferred and kind != "promote":
                preferred.add((id(owner), name))
    for owner, name, kind, message in _listed():
        if (id(owner), name) not in preferred or not kind.startswith(("lower", "float")):
            add(owner, name, kind, message)
    add(torch.nn.RNNBase, "check_input", CHECK_INPUT)
    for name in (*RNNS, *CELLS):
        add(RECURRENT, name, "lower")
    registered = {(id(owner), name) for wanted in _wanted for owner, name, _ in wanted.registrations}
    for owner, name, place in _aliases({key: place for key, place in found.items() if key not in registered}):
        found.setdefault((id(owner), name), dataclasses.replace(place, owner=owner, name=name))
    return found


def _listed() -> Iterator[tuple[Any, str, str, str]]:
    """Owner, name, kind and message of every function in Apex's lists."""
    for lists in LISTS:
        owner = _namespace(lists.module)
        for name in dict.fromkeys((*lists.FP16_FUNCS, *lists.BFLOAT16_FUNCS)):
            in_both = name in lists.FP16_FUNCS and name in lists.BFLOAT16_FUNCS
            yield owner, name, "lower" if in_both else _only(name in lists.FP16_FUNCS), ""
        for kind, names in (("float", lists.FP32_FUNCS), ("promote", lists.CASTS), ("sequence", lists.SEQUENCE_CASTS)):
            for name in names:
                yield owner, name, kind, ""
        for name in in_place(lists.FP32_FUNCS) if lists.module != "torch.nn.functional" else ():
            yield owner, name, "refuse_method" if isinstance(owner, type) else "refuse_function", ""
        for name in in_place([*lists.FP16_FUNCS, *lists.CASTS]) if isinstance(owner, type) else ():
            yield owner, name, "match", ""
        for name, message in lists.BANNED_FUNCS:
            yield owner, name, "banned", message


def _only(fp16: bool) -> str:
    return "lower_fp16" if fp16 else "lower_bf16"


def _namespace(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(torch, name) if module == "torch" else importlib.import_module(path)


def _aliases(places: Mapping[tuple[int, str], _Place]) -> Iterator[tuple[Any, str, _Place]]:
    """Other names of listed functions, newer than Apex: ``nn.PReLU`` calls ``F.prelu``, now the same as torch's."""
    owners = (torch, torch.nn.functional)
    functions = {
        id(_original(place.owner, place.name)): place
        for place in places.values()
        if place.owner in (*owners, RECURRENT)
    }
    for owner in owners:
        for name in list(vars(owner)):
            place_of = functions.get(id(_original(owner, name)))
            if place_of is not None:
                yield owner, name, place_of


def _original(owner: Any, name: str) -> Any:
    """The attribute without a wrapper."""
    patch = _patches.get((id(owner), name))
    return getattr(owner, name) if patch is None else patch.original


# ---------------------------------------------------------------- caches of torch and of its compiler


def _prepare_compiler() -> None:
    """Make the compiler build its tables of torch's functions before any is replaced: it builds them once, by name."""
    with contextlib.suppress(Exception):  # a torch whose compiler cannot be imported compiles nothing
        dynamo.list_functions()


_digest: list[str] = []  # of what the wrappers do


def _clear_caches() -> None:
    """Clear the caches of what was looked up or compiled while other functions were installed."""
    for function in vars(torch.overrides).values():
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()
    forget_graphs()
    _digest.clear()
    if _wanted:
        # The keys of the compiler's caches on disk have the names of called functions. The tag adds what wrappers do.
        told = [(place.name, place.kinds) for place in (patch.place for patch in _patches.values())]
        told_all = (__version__, told, [wanted.tag for wanted in _wanted])
        _digest.append(hashlib.sha256(repr(told_all).encode()).hexdigest()[:12])
    tag_caches()


def tag_caches() -> None:
    """Put into the keys of the compiler's caches on disk what wrappers do now, and whether their casts are paused.

    The slot tells of a pause too, but only on the thread that began it, and not where ``_is_active`` was written to.
    """
    cache_keys.put("apex", f"{_digest[0]}{'-paused' * process.is_paused}" if _digest else "")


process.tell_switched = tag_caches
