"""The block in which a process answers for CUDA, Apex and torch_npu: all is put in place, and taken out at its end."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xamp import apex
from xamp.accel.defaults import FORMATS, has_memory_format
from xamp.apex._patches import Wanted, held, release
from xamp.registry.device_in_use import DEVICE_VARIABLE, in_use
from xamp.run import ascend, casts, handlers, launch, names, ranks, table
from xamp.run.devices import Target
from xamp.run.launch import Settings
from xamp.run.patches import Patches, clear_caches, prepare_torch
from xamp.run.report import Report
from xamp.run.site import Context, Site
from xamp.sessions.grad_scaler import GradScaler
from xamp.torch_compat.torch_private.originals import is_cuda

__all__ = ["Redirection", "redirected", "start_in_child"]

_ALIASES = (
    *("torch", "torch.amp", "torch.serialization", "torch.distributed", "torch.distributed.distributed_c10d"),
    *("torch.cuda", "torch.cuda.random", "torch.cuda.memory", "torch.cuda.streams", "torch.cuda.graphs"),
)
"""Modules of torch that hold the same function under the same name."""

_CALLED = {
    "torch.distributed.distributed_c10d": "",
    "torch.distributed.device_mesh": "",
    "torch.serialization": "torch",
    "torch.amp.autocast_mode": "",
    "_StorageBase": "Storage",
    "TypedStorage": "Storage",
    "DeviceContext": "with torch.device",
}
"""How scripts call an owner, where that is not its name."""


@contextlib.contextmanager
def redirected(device: str | None = None, *, pretend_cuda: bool = False, prefer: str = "real") -> Iterator[Report]:
    """Redirect in this process until the end of the block; the value is the report. What ``xamp run`` does, for code.

    Args:
        device: the device that answers, as in ``XAMP_DEVICE``; None means :func:`xamp.device`.
        pretend_cuda: tell scripts that CUDA is there.
        prefer: see :func:`xamp.apex.install`.

    Raises:
        BackendUnavailable: there is no such device.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_device_named(device))
        redirection = Redirection(Settings(pretend_cuda, prefer))
        stack.callback(redirection.stop)
        redirection.start()
        yield redirection.report


class Redirection:
    """Everything that stands in another's place in this process.

    Args:
        settings: the options.

    Attributes:
        target: the device that answers.
        report: what was counted.

    Raises:
        BackendUnavailable: there is no such device.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.target = Target.in_use(settings.pretend)
        self.report = Report(self.target.type, settings.folder)
        self._patches = Patches()
        self._ascend: ascend.Ascend | None = None
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Put everything in place; an error leaves nothing behind."""
        tables = Patches()
        prepare_torch(tables)
        context = Context(self.target, self.report)
        with contextlib.ExitStack() as stack:
            stack.callback(tables.undo)
            stack.callback(clear_caches)
            stack.callback(_end_casts, held())
            stack.callback(self._patches.undo)
            apex.install(self.settings.prefer)
            stack.callback(apex.uninstall)
            if "cuda" in self.target.answers_for:
                redirect_cuda(context, self._patches)
            else:
                _rows(context, self._patches, only_foreign=True)
            if "npu" in self.target.answers_for:
                self._ascend, take_out = ascend.serve(context, self._patches)
                stack.callback(take_out)
            launch.pass_local_rank(self._patches, self.report)
            launch.reach_children(self._patches, self.settings, self.report, start_in_child)
            clear_caches()
            self._stack = stack.pop_all()

    def expect(self, source: bytes) -> None:
        """Prepare for a script with this text: one that names Ascend cards may do so before it imports torch_npu."""
        if self._ascend is not None and b"npu" in source:
            self._ascend.notice()

    def stop(self) -> None:
        """Take everything out."""
        self._stack.close()


def _end_casts(before: list[Wanted]) -> None:
    """End what a script's ``amp.initialize`` at O1 put in torch's functions, which no script ever ends."""
    for wanted in held():
        if not any(wanted is other for other in before):
            release(wanted)


def start_in_child(settings: Settings) -> None:
    """Start the redirection in a process that multiprocessing spawned, for its whole life."""
    redirection = Redirection(settings)
    redirection.start()
    multiprocessing.util.Finalize(None, redirection.report.leave, exitpriority=0)


def redirect_cuda(context: Context, patches: Patches) -> None:
    """Put in place what answers for CUDA."""
    _rows(context, patches)
    for name in table.ANSWERED["functions"]:
        _put(context, patches, torch.cuda, name, names.answered, f"xamp.accel.{name}()")
    for name in table.ANSWERED["classes"]:
        _put(context, patches, torch.cuda, name, names.answered_class, f"xamp.accel.{name}")
    for name in table.ANSWERED["nvtx"]:
        _put(context, patches, torch.cuda.nvtx, name, names.answered, f"xamp.accel.nvtx.{name}()")
    for name in table.ASKED:
        _put(context, patches, torch.cuda, name, names.asked)
    for name, advice in table.REFUSED.items():
        if hasattr(torch.cuda, name):
            _put(context, patches, torch.cuda, name, names.refused, advice)
    for name in table.TENSOR_TYPES:
        _put(context, patches, torch.cuda, name, casts.legacy_type, "torch.tensor(..., device=xamp.device())")
    _redirect_accelerator(context, patches)
    used = in_use()
    if used.backend.capabilities(used.device).overflow == "flag":  # torch's scaler would not see an overflow there
        for owner in (torch.amp, torch.cuda.amp):
            patches.replace(owner, "GradScaler", GradScaler)
    if context.target.pretend:
        site = Site(context, is_cuda, "Tensor.is_cuda")
        patches.replace(torch.Tensor, "is_cuda", names.is_cuda(site))


def _redirect_accelerator(context: Context, patches: Patches) -> None:
    """Put in place what answers for torch.accelerator, unless its accelerator is the device in use."""
    home = torch.accelerator
    own = home.current_accelerator()
    if own is not None and own.type == context.target.type:
        return
    for owner in (home, getattr(home, "memory", None)):
        for name, wanted in table.ACCELERATOR.items():
            if hasattr(owner, name):
                _put(context, patches, owner, name, names.of_accelerator, f"xamp.accel.{wanted}()")
    for name in table.ASKED_OF_ACCELERATOR:
        _put(context, patches, home, name, getattr(names, name, names.asked))


def _rows(context: Context, patches: Patches, only_foreign: bool = False) -> None:
    """Put in place the rows of the table; with ``only_foreign`` those that take a device, and not the names of CUDA."""
    has_all = all(map(has_memory_format, FORMATS))
    for row in table.ROWS:
        if row.handler == "memory_format_argument" and has_all:
            continue
        if only_foreign and row.handler.startswith(("move", "autocast", "grad_scaler", "default_tensor", "data_")):
            continue
        owner = pkgutil.resolve_name(row.owner)
        make = _handler(row.handler)
        for name in row.names:
            if hasattr(owner, name):
                _put(context, patches, owner, name, make, row.port)


def _handler(name: str) -> Callable[[Site], Any]:
    for module in (handlers, casts, ranks):
        if name in module.__all__:
            made: Callable[[Site], Any] = getattr(module, name)
            return made
    raise LookupError(name)


def _put(
    context: Context, patches: Patches, owner: Any, name: str, make: Callable[[Site], Any], port: str = ""
) -> None:
    original = getattr(owner, name, None)
    made = make(Site(context, original, _label(owner, name), port))
    script = owner is torch and callable(original) and not isinstance(original, type)
    patches.replace(owner, name, made, script=script)
    if isinstance(owner, type):
        return
    for path in _ALIASES:
        module = sys.modules.get(path)
        if module is not None and module is not owner and vars(module).get(name) is original:
            patches.replace(module, name, made)


def _label(owner: Any, name: str) -> str:
    if isinstance(owner, type):
        called = _CALLED.get(owner.__name__, owner.__name__)
        return called if name == "__init__" else f"{called}.{name}"
    place = _CALLED.get(owner.__name__, owner.__name__)
    return f"{place}.{name}" if place else name


@contextlib.contextmanager
def _device_named(device: str | None) -> Iterator[None]:
    if device is None:
        yield
        return
    before = os.environ.get(DEVICE_VARIABLE)
    os.environ[DEVICE_VARIABLE] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEVICE_VARIABLE]
        else:
            os.environ[DEVICE_VARIABLE] = before
