"""A lane is one usable device with its backend: what a test marked ``device`` runs on.

Which lanes there are is read from the registry, never from a list here, so that a new backend runs every such test.
"""

from __future__ import annotations

import dataclasses

import torch

import xamp
from xamp._registry import resolve
from xamp.contract import Backend, Capabilities


@dataclasses.dataclass(frozen=True)
class Lane:
    """One device, its backend and what that declares."""

    backend: Backend
    device: torch.device

    @property
    def can(self) -> Capabilities:
        return self.backend.capabilities(self.device)

    def overflow_(self, grad: torch.Tensor) -> None:
        """Make this device overflow, into ``grad``."""
        with torch.no_grad():
            self.backend.make_overflow_(grad)

    def __str__(self) -> str:
        return self.backend.name


def usable_lanes() -> list[Lane]:
    """A lane for each backend whose probe passed, on its first device type; each device type once."""
    lanes: dict[str, Lane] = {}
    for report in xamp.available_backends():
        if report.usable and report.device_types[0] not in lanes:
            kind = report.device_types[0]
            lanes[kind] = Lane(resolve(report.name, kind), torch.device(kind))
    return list(lanes.values())
