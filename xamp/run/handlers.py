"""Handlers for placing data: ``.cuda()``, device arguments, ``torch.load``. Each makes what takes a name's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.accel.defaults import FORMATS, has_memory_format
from xamp.run.devices import Target
from xamp.run.site import Site, like
from xamp.run.standins import stand_in
from xamp.torch_compat.torch_private.originals import tensor_to

__all__ = [
    "data_parallel",
    "device_argument",
    "generator",
    "grad_scaler",
    "jit_load",
    "labels",
    "load",
    "loader",
    "memory_format_argument",
    "move",
    "move_module",
    "move_storage",
    "pin",
    "type_argument",
]


def move(site: Site) -> Any:
    """``Tensor.cuda``, ``Tensor.npu``."""
    to, target = tensor_to, site.target

    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        site.note()
        if "memory_format" in kwargs:
            _drops_format(site, kwargs)
        return to(self, _place(target, device), non_blocking=non_blocking, **kwargs)

    return like(site.original or torch.Tensor.cuda, cuda)


def move_module(site: Site) -> Any:
    """``Module.cuda``, ``Module.npu``."""
    to, target = tensor_to, site.target

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        site.note()
        place = _place(target, device)
        return self._apply(lambda tensor: to(tensor, place, non_blocking=non_blocking))

    return like(site.original or torch.nn.Module.cuda, cuda)


def move_storage(site: Site) -> Any:
    """``UntypedStorage.cuda``, ``TypedStorage.cuda``, also inside of a ``map_location``."""
    target = site.target

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        site.note()
        place = _place(target, device)
        return self.cpu() if target.is_host else self.to(device=place, non_blocking=non_blocking)

    return like(site.original or torch.UntypedStorage.cuda, cuda)


def _place(target: Target, device: Any) -> torch.device:
    if device is None or device is True:
        return target.at(None)
    if target.is_foreign(device):
        return target.map(device)
    return torch.device(device)  # a device of the type in use, or an error of torch's


# ---------------------------------------------------------------- device arguments

_KEYS = ("device", "map_location", "device_id", "device_type")


def device_argument(site: Site) -> Any:
    """A function that takes a device, by position or as ``device=``."""
    return _with_device(site, lambda value: site.target.map(value))


def type_argument(site: Site) -> Any:
    """A function that takes a device type as text."""
    return _with_device(site, lambda value: site.target.map(value).type)


def _with_device(site: Site, convert: Callable[[Any], Any]) -> Any:
    target, original = site.target, site.original
    by_index = site.label.endswith((".to", ".to_empty", ".set_default_device"))
    host = target.is_host

    def function(*args: Any, **kwargs: Any) -> Any:
        if "memory_format" in kwargs and _drops_format(site, kwargs) and by_index and len(args) == 1 and not kwargs:
            return args[0]  # nothing else was asked for
        for key in _KEYS:
            value = kwargs.get(key)
            if value is not None and target.is_foreign(value):
                site.named(value, key)
                kwargs[key] = convert(value)
        if host and kwargs.get("pin_memory"):
            site.note(f"{site.label}(pin_memory=True)", port="pin_memory=xamp.is_available()")
            del kwargs["pin_memory"]
        for position, value in enumerate(args):
            named = isinstance(value, (str, torch.device)) or (by_index and type(value) is int)
            if named and target.is_foreign(value):
                site.named(value)
                args = (*args[:position], convert(value), *args[position + 1 :])
        return original(*args, **kwargs)

    return like(original, function, site.label)


def memory_format_argument(site: Site) -> Any:
    """A method that takes ``memory_format`` and no device."""
    original = site.original

    def function(*args: Any, **kwargs: Any) -> Any:
        if "memory_format" in kwargs:
            _drops_format(site, kwargs)
        return original(*args, **kwargs)

    return like(original, function, site.label)


def _drops_format(site: Site, kwargs: dict[str, Any]) -> bool:
    """Take a memory format out that the device in use does not have, and say so; whether that was done."""
    for name in FORMATS:
        if kwargs["memory_format"] is getattr(torch, name) and not has_memory_format(name):
            del kwargs["memory_format"]
            what = f"{site.label}(memory_format=torch.{name}), dropped"
            site.note(what, port=f"memory_format=xamp.accel.{name}")
            return True
    return False


def jit_load(site: Site) -> Any:
    """``torch.jit.load``. ``torch.load`` calls it for an archive of TorchScript, with its own ``map_location``."""
    original, target = site.original, site.target

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        map_location = getattr(map_location, "_xamp_wanted", map_location)
        if map_location is not None and target.is_foreign(map_location):
            site.named(map_location, "map_location")
            map_location = target.map(map_location)
        elif map_location is None and target.is_host:
            map_location = target.at(None)  # an archive that was saved on a card would be put there
        return original(f, map_location, *args, **kwargs)

    return like(original, load)


def data_parallel(site: Site) -> Any:
    """What ``DataParallel`` asks for the type of its devices: none on a CPU, also where the machine has cards."""
    target = site.target
    return like(site.original, lambda: None if target.is_host else target.type)


def grad_scaler(site: Site) -> Any:
    """``torch.amp.GradScaler.__init__``, whose device is ``"cuda"`` where none is given."""
    original, target = site.original, site.target

    def __init__(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        if target.is_foreign(device):
            site.note("GradScaler()")
            device = target.type
        original(self, device, *args, **kwargs)

    return like(original, __init__)


def generator(site: Site) -> Any:
    """``torch.Generator``, a class of C."""
    original, target = site.original, site.target

    def call(device: Any = "cpu") -> Any:
        if target.is_foreign(device):
            site.named(device, "device")
            device = target.map(device)
        return original(device=device)

    made = stand_in(original, call)
    made.__module__ = "torch"  # where pickle finds it
    return made


def loader(site: Site) -> Any:
    """``DataLoader.__init__`` with ``pin_memory_device``."""
    original, target = site.original, site.target

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        value = kwargs.get("pin_memory_device")
        if value and target.is_foreign(value):
            site.note(f"DataLoader(pin_memory_device={value!r})", port="leave pin_memory_device out")
            kwargs["pin_memory_device"] = "" if target.is_host else target.type
        original(self, *args, **kwargs)

    return like(original, __init__)


def pin(site: Site) -> Any:
    """``Tensor.pin_memory``, which needs an accelerator."""
    original, target = site.original, site.target

    def pin_memory(self: Any, device: Any = None) -> Any:
        if target.is_host:
            site.note()
            return self
        return original(self) if device is None or target.is_foreign(device) else original(self, device)

    return like(original, pin_memory, site.label)


def load(site: Site) -> Any:
    """``torch.load``: ``map_location`` in each of its forms, and files of tensors that were saved on another device."""
    original, target = site.original, site.target

    def restore(storage: Any, tag: Any) -> Any:
        if not target.is_foreign(tag):
            return None
        site.note(f"torch.load() of tensors saved on {tag!r}")
        return torch.serialization.default_restore_location(storage, str(target.map(tag)))

    def location(wanted: Any) -> Any:
        if wanted is None:
            return _instead_of(None, lambda storage, tag: restore(storage, tag))
        if isinstance(wanted, dict):
            return _instead_of(wanted, lambda storage, tag: _restored(storage, wanted.get(tag, tag)))
        if callable(wanted) and not isinstance(wanted, torch.device):
            return _instead_of(wanted, lambda storage, tag: _or(wanted(storage, tag), lambda: restore(storage, tag)))
        if target.is_foreign(wanted):
            site.named(wanted, "map_location")
            return target.map(wanted)
        return wanted

    def _restored(storage: Any, tag: Any) -> Any:
        return _or(restore(storage, tag), lambda: torch.serialization.default_restore_location(storage, tag))

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, location(map_location), *args, **kwargs)

    return like(original, load)


def labels(site: Site) -> Any:
    """A loss over class indices, in a script for Ascend: cards take indices in int32, torch's other devices do not."""
    original = site.original

    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target.dtype == torch.int32:
            site.note(f"{site.label}(target in int32)")
            target = target.long()
        return original(input, target, *args, **kwargs)

    return like(original, loss)


def _instead_of(wanted: Any, restore: Callable[[Any, Any], Any]) -> Any:
    """``restore``, which says what the script gave in its place."""
    made: Any = restore
    made._xamp_wanted = wanted
    return made


def _or(found: Any, other: Callable[[], Any]) -> Any:
    return other() if found is None else found
