"""What a handler of :mod:`xamp.run.table` gets, and what all handlers use."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from xamp.run.devices import Target
from xamp.run.report import Report

__all__ = ["Context", "Site", "is_inside", "like"]


@dataclasses.dataclass(frozen=True)
class Context:
    """What every handler needs.

    Attributes:
        target: the device that answers.
        report: where calls are counted.
    """

    target: Target
    report: Report


@dataclasses.dataclass(frozen=True)
class Site:
    """One name that is replaced.

    Attributes:
        context: see :class:`Context`.
        original: what stands there; None where nothing does.
        label: how a script spells it, such as ``Tensor.to``.
        port: what to write in a port.
        family: the foreign device type that it belongs to.
    """

    context: Context
    original: Any
    label: str
    port: str = ""
    family: str = "cuda"

    @property
    def target(self) -> Target:
        """The device that answers."""
        return self.context.target

    def note(self, what: str = "", kind: str = "redirected", port: str | None = None) -> None:
        """Count a call; ``what`` stands for the call if it is not the bare name."""
        self.context.report.note(kind, what or f"{self.label}()", self.port if port is None else port)

    def named(self, value: object, key: str = "") -> None:
        """Count a call with a device as argument."""
        spelled = repr(str(value)) if isinstance(value, torch.device) else repr(value)
        self.note(f"{self.label}({f'{key}=' if key else ''}{spelled})")


def is_inside(depth: int = 2) -> bool:
    """Whether the caller of the function that calls this one is torch, a part of xamp, or a vendor's part of torch."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_globals.get("__name__") == "xamp.run.standins":
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("torch", "xamp", "torch_npu")


def like(original: Any, replacement: Callable[..., Any], label: str = "") -> Callable[..., Any]:
    """Give a replacement the name and the place of the original, so that it is pickled by name.

    Args:
        original: what stood there.
        replacement: what stands there now.
        label: for a function of C, which does not say where it stands: its name as a script spells it.
    """
    functools.update_wrapper(replacement, original)
    replacement.__dict__.pop("__wrapped__", None)
    if label.startswith("Tensor."):
        replacement.__module__, replacement.__qualname__ = "torch", label
    elif not isinstance(getattr(original, "__module__", None), str) or "." in getattr(original, "__qualname__", ""):
        module, _, name = label.rpartition(".")
        if module.partition(".")[0] == "torch":
            replacement.__module__, replacement.__qualname__ = module, name
    return replacement
