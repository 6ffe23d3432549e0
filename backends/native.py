"""Base classes for devices on which torch.autocast and torch's own kernels do the work: they probe and describe them.

:class:`NativeBackend` needs only the device type of its spec. :class:`ModuleBackend` also uses the device's
module in torch (such as ``torch.xpu``), so such a backend is only a few class attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from xamp.backend_kit import defect_of, first_sentence, fused_forms, masked
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.errors import BackendUnavailable
from xamp.policy import LEVELS

__all__ = [
    "CUDNN_KERNELS",
    "GPU_KERNELS",
    "LOWER_DTYPES",
    "ModuleBackend",
    "NativeBackend",
    "defect_of",
    "levels_for",
]

LOWER_DTYPES = ("float16", "bfloat16")
CUDNN_KERNELS = ("cudnn_convolution", "cudnn_convolution_transpose")
GPU_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    *CUDNN_KERNELS,
)
"""Operators of the table that have a kernel on CUDA's GPUs, and on few other devices."""


class NativeBackend(Backend):
    """A device on which torch.autocast and torch's own kernels work.

    What it can do is tried on the device and not listed: the lower dtypes that :meth:`dtypes` names, each of which goes
    alone if it does not compute, and torch.optim's fused implementations.

    Attributes:
        fast_dtypes: see :class:`~xamp.contract.Capabilities`; dtypes that the device lacks are left out.
        process_group: see :class:`~xamp.contract.Capabilities`.
        fp8_rehearsed: see :class:`~xamp.contract.Capabilities`.
        left_out: why :meth:`dtypes` leaves a lower dtype out, as ``Capabilities.lacking`` says it.
    """

    fast_dtypes: tuple[str, ...] = ()
    process_group: str = "gloo"
    fp8_rehearsed: tuple[str, ...] = ()
    left_out: str = "the device has no arithmetic of its own for it"

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec)
        self._of = functools.lru_cache(maxsize=None)(self._capabilities_of)

    def probe(self) -> None:
        """See :meth:`xamp.contract.Backend.probe`: find a device, and compute in float32 and each lower dtype.

        A dtype that fails takes its levels away; for float32 these are all. The device stays if it multiplies matrices.
        """
        self.require_device()
        device = self.probed_device()
        # First of all: where the device queues work, a failure is reported only once, by the next call.
        if defect := defect_of(device, "float32", product_only=True):
            broken = BackendUnavailable(f"{device} is there, but {defect}\n{self._repair_hint()}")
            broken.is_there = True
            raise broken
        self.capabilities(device)

    def require_device(self) -> None:
        """Raise BackendUnavailable, with cause and cure, if there is no device to compute on."""

    def keeps_inf(self, device: torch.device) -> bool:
        """Whether an overflow on ``device`` gives inf; False if it saturates and raises a flag."""
        return True

    def probed_device(self) -> torch.device:
        """The device that the probe computes on."""
        return torch.device(self.device_type)

    def dtypes(self, device: torch.device | None = None) -> tuple[str, ...]:
        """Names of the lower dtypes that ``device`` (None: the current one) should compute in; each is tried."""
        return LOWER_DTYPES

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        """See :meth:`xamp.contract.Backend.capabilities`: the levels follow from the dtypes in which it computes."""
        return self._of(self.probed_device() if device is None or device.index is None else device)

    def _capabilities_of(self, device: torch.device) -> Capabilities:
        dtypes, lacking = self._try_dtypes(device)
        return _Tried(
            {"fused_optimizers": lambda: self.fused_optimizers_of(device), "fp8": lambda: self.fp8_of(device)},
            levels=() if "float32" in dict(lacking) else levels_for(dtypes),
            dtypes=dtypes,
            fast_dtypes=tuple(name for name in self.fast_dtypes_of(device) if name in dtypes),
            overflow="inf" if self.keeps_inf(device) else "flag",
            process_group=self.process_group,
            lacking=lacking,
            fp8_rehearsed=self.fp8_rehearsed,
        )

    def fast_dtypes_of(self, device: torch.device | None = None) -> tuple[str, ...]:
        """Names of the dtypes that the hardware of ``device`` (None: the current one) runs natively."""
        return self.fast_dtypes

    def fused_optimizers_of(self, device: torch.device) -> tuple[str, ...]:
        """Names of the classes of torch.optim whose fused implementation is right on ``device``; asked once."""
        return fused_forms(device)

    def fp8_of(self, device: torch.device) -> tuple[str, ...]:
        """Names of the recipes of fp8 that the hardware of ``device`` runs rightly; asked once."""
        return ()

    def _try_dtypes(self, device: torch.device) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Compute in each dtype; return the lower ones that work, and the others, each with why it is not there."""
        # Without float32 no trial of another dtype ends well.
        if defect := self._defect(device, "float32"):
            return (), (("float32", first_sentence(defect)),)
        wanted = self.dtypes(device)
        left = dict.fromkeys((name for name in LOWER_DTYPES if name not in wanted), self.left_out)
        found = {**{name: first_sentence(self._defect(device, name)) for name in wanted}, **left}
        there = tuple(name for name, defect in found.items() if not defect)
        return there, tuple((name, defect) for name, defect in found.items() if defect)

    def _defect(self, device: torch.device, dtype: str) -> str:
        return defect_of(device, dtype, self.keeps_inf(device), self.unscale_)

    def _repair_hint(self) -> str:
        return self.spec.install_hint or f"update the driver of the device and torch (now {torch.__version__})"


def _asked(name: str) -> Any:
    return functools.cached_property(lambda self: self.__dict__["_asks"][name]())


class _Tried(Capabilities):
    """Capabilities of which two are tried when somebody first asks for them; one record for each device.

    An optimizer of torch imports torch's compiler, which takes 0.7 s. What only wants to know the device need not wait.
    So a record equals none but itself, and its text shows what was tried: neither runs a step.
    """

    def __init__(self, asks: Mapping[str, Callable[[], tuple[str, ...]]] | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self.__dict__["_asks"] = asks or {}
        for name in asks or ():
            del self.__dict__[name]

    fused_optimizers = _asked("fused_optimizers")
    fp8 = _asked("fp8")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        known = {field.name: self.__dict__.get(field.name, "(not tried)") for field in dataclasses.fields(self)}
        return f"Capabilities({', '.join(f'{name}={value!r}' for name, value in known.items())})"


class ModuleBackend(NativeBackend):
    """A device that torch drives through its own module, ``torch.get_device_module(device_type)``."""

    @property
    def module(self) -> ModuleType:
        """The device's module in torch."""
        module: ModuleType = torch.get_device_module(self.device_type)
        return module

    def require_device(self) -> None:
        """See :meth:`NativeBackend.require_device`."""
        if self.is_available():
            return
        behind_mask = masked({name: os.environ[name] for name in self.spec.masks if name in os.environ})
        raise BackendUnavailable(
            "\n".join(behind_mask)
            if behind_mask
            else f"torch {torch.__version__} finds no {self.device_type} device\n"
            "install a build of torch for it, its driver, and check that the machine has one"
        )

    def is_available(self) -> bool:
        """Whether torch sees such a device."""
        return bool(self._ask("is_available", False))

    def probed_device(self) -> torch.device:
        """The current device or, if none was set yet, the one that torchrun's ``LOCAL_RANK`` names.

        Otherwise each rank of a machine would leave a context of some hundred MB on the first device.
        """
        current, local_rank = int(self._ask("current_device", 0)), os.environ.get("LOCAL_RANK", "")
        if current == 0 and local_rank.isdecimal() and int(local_rank) < self.device_count():
            current = int(local_rank)
        return torch.device(self.device_type, current)

    def device_count(self) -> int:
        """How many devices torch sees."""
        return int(self._ask("device_count", 1))

    def devices(self) -> Sequence[str]:
        """See :meth:`xamp.contract.Backend.devices`."""
        return [str(self._ask("get_device_name", self.device_type, index)) for index in range(self.device_count())]

    def _ask(self, function: str, default: Any, *args: Any) -> Any:
        """Call a function of the device's module; return ``default`` if the module has no such function."""
        found = getattr(self.module, function, None)
        return default if found is None else found(*args)


def levels_for(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The levels that a device can run if it computes in ``dtypes`` and in fp32."""
    return tuple(level.name for level in LEVELS.values() if level.dtype is None or level.dtype in dtypes)
