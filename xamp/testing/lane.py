"""Lanes. A clause of the suite runs on a lane: one device, its backend, and what the backend declares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pytest
import torch

from xamp.contract import Backend, Capabilities
from xamp.errors import BackendUnavailable, PolicyError
from xamp.policy import LEVELS
from xamp.registry import registry

__all__ = [
    "CAPABILITIES",
    "SKIPPED",
    "UNDECLARED",
    "Lane",
    "in_full_fp32",
    "open_lane",
    "parse_requirements",
    "usable_lanes",
]

CAPABILITIES = {
    **{name: f"level {name}" for name in LEVELS},
    "float16": "computing in float16",
    "bfloat16": "computing in bfloat16",
    "fp8": "linear layers in fp8, run or rehearsed",
    "fused": "fused optimizers that honour found_inf",
    "portable": "the portable op policy",
    "native": "the device's own op list",
    "distributed": "two processes, over the process group that the backend declares",
    "compile": "torch.compile",
}
"""By name, what ``--require`` can ask for; the texts complete the reason of a skip."""

_ALIASES = {"fp16": "float16", "bf16": "bfloat16"}

UNDECLARED = "not declared: "
SKIPPED = "cannot be tried here: "
"""How the reason of a skip begins. UNDECLARED: the backend does not claim the capability; SKIPPED: all other cases."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """One device, its backend and what the backend declares.

    Attributes:
        backend: The backend, whose probe passed.
        device: The device that tensors are made on.
        required: Capabilities whose absence is a failure.
    """

    backend: Backend
    device: torch.device
    required: frozenset[str] = frozenset()

    @property
    def can(self) -> Capabilities:
        """What the backend declares for the device."""
        return self.backend.capabilities(self.device)

    @property
    def kind(self) -> str:
        """The device's type, such as ``"cpu"``."""
        return self.device.type

    @property
    def title(self) -> str:
        """The lane's unique title: the backend's name, and the device's index if one is given, as in ``"cuda:1"``."""
        _, colon, index = str(self.device).partition(":")
        return f"{self}{colon}{index}"

    @property
    def device_name(self) -> str:
        """What the backend calls the device, such as a card's name."""
        names = list(self.backend.devices())
        index = self.device.index or 0
        return names[index] if index < len(names) else self.kind

    @functools.cached_property
    def has_grad_scaler(self) -> bool:
        """Whether torch.amp.GradScaler runs on the device."""
        param = torch.nn.Parameter(torch.ones(4, device=self.device))
        optimizer = torch.optim.SGD([param], lr=0.1)
        try:
            scaler = torch.amp.GradScaler(self.kind)
            scaler.scale(param.sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, AssertionError):
            return False
        return scaler.is_enabled()

    def overflow_(self, grad: torch.Tensor) -> None:
        """Make this device overflow, and write the result into ``grad``."""
        with torch.no_grad():
            self.backend.make_overflow_(grad)

    def declares(self, capability: str) -> bool:
        """Whether the backend declares ``capability``, one of :data:`CAPABILITIES`. ``compile`` is always declared."""
        can = self.can
        if capability in LEVELS:
            return capability in can.levels
        declared = {
            "float16": "float16" in can.dtypes,
            "bfloat16": "bfloat16" in can.dtypes,
            "fp8": bool(can.fp8 or can.fp8_rehearsed),
            "fused": bool(can.fused_optimizers),
            "portable": "portable" in can.op_policies,
            "native": "native" in can.op_policies,
            "distributed": bool(can.process_group),
            "compile": True,
        }
        return declared[capability]

    def need(self, *capabilities: str) -> None:
        """Unless the backend declares all of these, end the clause as not declared, or as failed if required."""
        for capability in capabilities:
            if not self.declares(capability):
                self._end(capability, f"{UNDECLARED}{CAPABILITIES[capability]}")

    def lacks(self, what: str) -> NoReturn:
        """End the clause as not declared. ``what``, in a few words, is not a capability that one can require."""
        pytest.skip(f"{UNDECLARED}{what}")

    def cannot(self, capability: str, reason: str) -> NoReturn:
        """End the clause as skipped, or as failed if ``capability`` is required.

        Args:
            capability: One of :data:`CAPABILITIES`.
            reason: What is missing here, in a few words.
        """
        self._end(capability, f"{SKIPPED}{CAPABILITIES[capability]}: {reason}")

    def _end(self, capability: str, reason: str) -> NoReturn:
        if capability in self.required:
            pytest.fail(f"{capability} is required on {self}, and {reason}", pytrace=False)
        pytest.skip(reason)

    def __str__(self) -> str:
        return self.backend.name


def open_lane(backend: str = "auto", device: str = "", require: Iterable[str] = ()) -> Lane:
    """The lane of a backend on a device.

    Args:
        backend: The backend's name; ``"auto"``: the best one for the device.
        device: The device, such as ``"cuda"`` or ``"cuda:1"``, or a backend's name in place of the type; empty: the
            first device type that the backend serves.
        require: Capabilities whose absence is a failure, in the form that :func:`parse_requirements` takes.

    Raises:
        BackendUnavailable: The backend does not exist or does not work; the message says why.
        PolicyError: A capability does not exist, or ``device`` does not name a device.
    """
    required = parse_requirements(require)
    specs = list(registry.REGISTRY.specs())
    kind, colon, index = device.partition(":")
    if backend == "auto" and not any(kind in spec.device_types for spec in specs):
        backend = next((spec.name for spec in specs if spec.name == kind), backend)
        device = "" if backend == kind else device
    if not device:
        types = next((spec.device_types for spec in specs if spec.name == backend), (registry.HOST,))
        device = f"{types[0]}{colon}{index}"
    found = registry.resolve(backend, device.partition(":")[0])
    return Lane(found, _device(found, device), required)


@contextlib.contextmanager
def in_full_fp32(lane: Lane) -> Iterator[None]:
    """A context in which the device computes float32 in all digits, where a program can make it.

    The suite compares with float32 and float64 references. Without this it would measure TF32, HF32, or the float16
    products of some chips, which no level of xamp has chosen.
    """
    done: set[str] = set()
    with contextlib.ExitStack() as undo:
        while rows := [row for row in lane.backend.precision_settings(lane.device) if row.exact]:
            if not {row.name for row in rows} - done:
                break
            for row in rows:
                if row.exact is not None and row.name not in done:
                    undo.callback(row.exact())
                    done.add(row.name)
        yield


def _device(backend: Backend, name: str) -> torch.device:
    """The device called ``name``. Call this after the backend is loaded: loading may teach torch the device type."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PolicyError(f"device={name!r}: {error}. Name a type, or one of its devices, such as 'cuda:1'.") from error
    count = len(list(backend.devices()))
    if (device.index or 0) >= max(count, 1):
        raise BackendUnavailable(f"device={name!r}: there {'is' if count == 1 else 'are'} {count} of this type")
    return device


def usable_lanes(require: Iterable[str] = ()) -> list[Lane]:
    """One lane for each backend whose probe passed, on its first device type; one for each device type.

    ``require`` names the capabilities that must be there.
    """
    lanes: dict[str, Lane] = {}
    for report in registry.available_backends():
        if report.usable and report.device_types[0] not in lanes:
            kind = report.device_types[0]
            lanes[kind] = open_lane(report.name, kind, require)
    return list(lanes.values())


def parse_requirements(require: Iterable[str]) -> frozenset[str]:
    """The full names of required capabilities. An item of ``require`` is one name, or several with commas between.

    Raises:
        PolicyError: A capability does not exist; the message lists those that do.
    """
    items: list[Any] = list(require)
    names = [part.strip() for item in items for part in str(item).split(",") if part.strip()]
    full = [_ALIASES.get(name, name) for name in names]
    for given, name in zip(names, full, strict=True):
        if name not in CAPABILITIES:
            raise PolicyError(
                f"require={given!r}: there is no such capability. There are {', '.join(CAPABILITIES)}; "
                "take one of these."
            )
    return frozenset(full)
