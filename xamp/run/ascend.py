"""Names of torch_npu for scripts that were written for Ascend cards, on a device that is none.

Where torch_npu is installed, its functions are redirected like those of torch.cuda. Where it is not, a finder answers
``import torch_npu`` and ``import torch.npu``, and ``torch.device("npu:0")`` is the device in use. The stand-in for
``torch.device`` is put in place only once a script has turned out to be one for Ascend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from xamp.apex._modules import MODULES
from xamp.casting.autocast import autocast
from xamp.errors import UnsupportedPolicy
from xamp.run import ascend_modules, casts, handlers, names, table
from xamp.run.patches import Patches
from xamp.run.site import Context, Site
from xamp.run.standins import stand_in
from xamp.torch_compat.torch_private.originals import StorageBase

__all__ = ["Ascend", "serve"]

_SETTINGS = (
    *("set_option", "set_compile_mode", "set_aoe", "set_mm_bmm_format_nd", "set_dump", "init_dump", "finalize_dump"),
    *("set_sync_debug_mode", "set_task_queue_enable", "prof_init", "clear_npu_overflow_flag"),
    *("enable_deterministic_with_backward", "disable_deterministic_with_backward", "global_step_inc"),
)
"""Functions of torch.npu that only set how a card works."""

_OPTIMIZERS = (
    *("NpuFusedSGD", "NpuFusedAdam", "NpuFusedAdamW", "NpuFusedLamb", "NpuFusedAdadelta", "NpuFusedAdamP"),
    *("NpuFusedBertAdam", "NpuFusedRMSprop", "NpuFusedRMSpropTF"),
)
_FILES = tuple(name.rpartition(".")[2] for name in MODULES if name.startswith("apex.optimizers.npu_"))
"""Files of torch_npu.optim, which are called as those of Ascend's Apex."""
_LOADED = ("torch_npu", "torch.npu")


def serve(context: Context, patches: Patches) -> tuple[Ascend | None, Callable[[], None]]:
    """Put in place what answers for torch_npu.

    Returns:
        The finder, None where torch_npu is installed; and a function that takes the modules out again.
    """
    for owner in (torch.Tensor, torch.nn.Module, StorageBase, torch.storage.TypedStorage):
        make = {torch.Tensor: handlers.move, torch.nn.Module: handlers.move_module}.get(owner, handlers.move_storage)
        label = f"{'Storage' if make is handlers.move_storage else owner.__name__}.npu"
        site = Site(context, getattr(owner, "npu", None), label, ".to(xamp.device())", "npu")
        patches.replace(owner, "npu", make(site))
    real = getattr(torch, "npu", None)
    if real is not None:
        for name, value in _names(context, real).items():
            patches.replace(real, name, value)
        return None, lambda: None
    ascend = Ascend(context, patches)
    patches.replace(torch, "npu", ascend.npu)
    for name in ascend_modules.OPERATORS:  # the older spelling, torch.npu_one_hot
        patches.replace(torch, name, getattr(ascend_modules, name))
    sys.meta_path.insert(0, ascend)
    return ascend, ascend.take_out


def _names(context: Context, real: Any) -> dict[str, Any]:
    """What stands for the names of torch.npu; with ``real`` only for those that it has."""
    made: dict[str, Any] = {}

    def add(name: str, make: Callable[[Site], Any], port: str = "") -> None:
        if real is None or hasattr(real, name):
            made[name] = make(Site(context, getattr(real, name, None), f"torch.npu.{name}", port, "npu"))

    for name in table.ANSWERED["functions"]:
        add(name, names.answered, f"xamp.accel.{name}()")
    for name in table.ANSWERED["classes"]:
        add(name, names.answered_class, f"xamp.accel.{name}")
    for name in table.ASKED:
        add(name, names.asked)
    for name in table.TENSOR_TYPES:
        add(name, casts.legacy_type, "torch.tensor(..., device=xamp.device())")
    return made


class Ascend(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins for torch_npu and its modules.

    Args:
        context: what the handlers need.
        patches: what is put in place later.

    Attributes:
        npu: the module ``torch.npu``.
    """

    def __init__(self, context: Context, patches: Patches) -> None:
        self._context, self._patches = context, patches
        self._noticed = False
        self.npu = self._npu()
        self._modules = self._packages()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`. xamp's own search for torch_npu finds none."""
        if name not in self._modules or _asked_by_xamp():
            return None
        package = any(other.startswith(f"{name}.") for other in self._modules)
        return importlib.machinery.ModuleSpec(name, self, is_package=package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See :class:`importlib.abc.Loader`."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """See :class:`importlib.abc.Loader`. The script is one for Ascend, so ``torch.device`` is taught its name."""
        self._context.report.note("redirected", f"import {module.__name__}", "import xamp")
        self.notice()

    def notice(self) -> None:
        """Let ``torch.device("npu:0")`` be the device in use from now on."""
        if self._noticed:
            return
        self._noticed = True
        original, target = torch.device, self._context.target

        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else kwargs.get("type", kwargs.get("device"))
            if isinstance(first, str) and first.strip().partition(":")[0] == "npu":
                self._context.report.note("redirected", f"torch.device({first!r})", "xamp.device()")
                index = args[1] if len(args) > 1 else kwargs.get("index")
                return target.map(first) if index is None else target.at(int(index))
            return original(*args, **kwargs)

        self._patches.replace(torch, "device", stand_in(original, call))
        for name in ("cross_entropy", "nll_loss"):
            loss = getattr(torch.nn.functional, name)
            site = Site(self._context, loss, f"functional.{name}", "target.long()", "npu")
            self._patches.replace(torch.nn.functional, name, handlers.labels(site), script=True)

    def take_out(self) -> None:
        """Take the finder and its modules out."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.startswith(_LOADED) and name in self._modules]:
            del sys.modules[name]

    def _npu(self) -> ModuleType:
        module = _Module("torch.npu", self)
        report = self._context.report

        def ignore(name: str, *_: Any, **__: Any) -> None:
            report.note("redirected", f"torch.npu.{name}()", "a setting of Ascend cards, without effect here")

        module.__dict__.update(_names(self._context, None))
        module.__dict__.update({name: functools.partial(ignore, name) for name in _SETTINGS})
        module.__dict__.update(
            get_npu_overflow_flag=lambda: False,
            get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
            is_jit_compile_false=lambda: True,
            is_initialized=lambda: True,
            config=SimpleNamespace(allow_internal_format=False),
            conv=SimpleNamespace(allow_hf32=False),
            matmul=SimpleNamespace(allow_hf32=False),
            OutOfMemoryError=torch.OutOfMemoryError,
        )
        module.__dict__["random"] = module.__dict__["memory"] = module
        return module

    def _packages(self) -> dict[str, ModuleType]:
        amp = _Module("torch.npu.amp", self)
        amp.__dict__.update(autocast=autocast, GradScaler=_scaler(self._context.target.type))
        self.npu.__dict__["amp"] = amp
        contrib = _Module("torch_npu.contrib.module", self)
        contrib.__dict__.update(
            {name: getattr(ascend_modules, name) for name in ascend_modules.__all__ if name != "OPERATORS"}
        )
        optim = _Module("torch_npu.optim", self)
        root = _Module("torch_npu", self)
        root.__dict__.update(npu=self.npu, __version__="0", __all__=[])
        root.__dict__.update({name: getattr(ascend_modules, name) for name in ascend_modules.OPERATORS})
        transfer = _Module("torch_npu.contrib.transfer_to_npu", self)
        made = {
            "torch.npu": self.npu,
            "torch.npu.amp": amp,
            "torch_npu": root,
            "torch_npu.npu": self.npu,
            "torch_npu.npu.amp": amp,
            "torch_npu.contrib": _Module("torch_npu.contrib", self),
            "torch_npu.contrib.module": contrib,
            "torch_npu.contrib.transfer_to_npu": transfer,
            "torch_npu.optim": optim,
            **{f"torch_npu.optim.{file}": _Module(f"torch_npu.optim.{file}", self) for file in _FILES},
            "torch_npu.profiler": _profiler(self),
        }
        made["torch_npu.contrib"].__dict__.update(module=contrib, **contrib.__dict__["_public"]())
        root.__dict__.update(contrib=made["torch_npu.contrib"], optim=optim, profiler=made["torch_npu.profiler"])
        return made


class _Module(ModuleType):
    """A module of torch_npu. What it does not have is an AttributeError that says why."""

    def __init__(self, name: str, ascend: Ascend) -> None:
        super().__init__(name)
        self.__dict__["_ascend"] = ascend
        self.__dict__["_public"] = lambda: {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__["__name__"]
        if name.startswith("__"):
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        if where.startswith("torch_npu.optim") and name in _OPTIMIZERS:
            return _optimizer(name)
        raise AttributeError(
            f"{where}.{name}: xamp run has no stand-in for this name of torch_npu on a device that is no Ascend card. "
            "An operator of the card (npu_...) has to be written with torch's own operators."
        )


def _optimizer(name: str) -> Any:
    """The optimizer of that name in xamp.apex."""
    found = getattr(importlib.import_module("xamp.apex.optimizers"), name, None)
    if found is None:
        raise UnsupportedPolicy(
            f"torch_npu.optim.{name}: xamp.apex.optimizers has none of that name. Take the one of torch.optim."
        )
    return found


def _scaler(device: str) -> Any:
    class GradScaler(torch.amp.GradScaler):
        """``torch.npu.amp.GradScaler`` on the device in use: torch's, with the argument ``dynamic``."""

        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            dynamic: bool = True,
            enabled: bool = True,
        ) -> None:
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
            self._dynamic = dynamic

        def update(self, new_scale: Any = None) -> None:
            """See ``torch.amp.GradScaler.update``; a scale that is not dynamic stays."""
            if self._enabled and not self._dynamic and new_scale is None:
                new_scale = self.get_scale()
            super().update(new_scale)

    return GradScaler


def _profiler(ascend: Ascend) -> ModuleType:
    module = _Module("torch_npu.profiler", ascend)
    names = ("profile", "schedule", "tensorboard_trace_handler", "ProfilerAction")
    module.__dict__.update({name: getattr(torch.profiler, name) for name in names})
    module.__dict__["ProfilerActivity"] = types.SimpleNamespace(
        CPU=torch.profiler.ProfilerActivity.CPU, NPU=torch.profiler.ProfilerActivity.CPU
    )
    return module


def _asked_by_xamp() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "xamp"
