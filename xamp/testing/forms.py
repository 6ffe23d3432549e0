"""Optimizers in each of their forms (implementations), at each setting that scales, each with a twin in plain torch."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from xamp.policy import LEVELS, Level
from xamp.testing.exact import LR, Pair, start
from xamp.testing.lane import Lane

__all__ = ["FEW", "FORMS", "FUSIBLE", "SETTINGS", "Form", "begin", "row_of", "stepped_as"]

SETTINGS: dict[str, dict[str, Any]] = {}
"""Each level under a dynamic scale; mixed: the optimizer steps masters and plain fp32 parameters side by side."""
for _row in LEVELS.values():
    if _row.dtype is not None:
        SETTINGS[_row.name] = {} if _row.dynamic else {"loss_scale": "dynamic"}
    if _row.dynamic and _row.master_weights:
        SETTINGS[f"{_row.name}-mixed"] = {"keep_fp32": ["*second"]}

WAYS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "auto": {},
}

HALF_EPS = 2.0**-10
"""An ``eps`` that fp16 can hold; it rounds the default of the Adam family to zero."""


@dataclasses.dataclass(frozen=True)
class Form:
    """An optimizer class, its arguments, and which of its implementations runs.

    Attributes:
        cls: A class of ``torch.optim``.
        options: Its arguments, except parameters and learning rate.
        way: The implementation, one of :data:`WAYS`.
    """

    cls: type[Optimizer]
    options: dict[str, Any]
    way: str

    def need(self, lane: Lane) -> None:
        """End the clause as not declared if ``lane`` has no such form."""
        if self.way == "fused" and self.cls.__name__ not in lane.can.fused_optimizers:
            lane.need("fused")
            lane.lacks(f"a fused {self.cls.__name__} that honours found_inf")
        if self.way in ("foreach", "capturable") and not self.runs(lane):
            lane.lacks(f"a {self.way} {self.cls.__name__}, which torch does not have here")

    def make(self, params: Any, half: bool = False) -> Optimizer:
        """Make the optimizer over ``params``; ``half``: they are fp16."""
        made: Any = self.cls
        eps = {"eps": HALF_EPS} if half and "eps" in inspect.signature(made).parameters else {}
        optimizer: Optimizer = made(params, lr=LR, **self.options, **eps, **WAYS[self.way])
        return optimizer

    def runs(self, lane: Lane) -> bool:
        """Whether torch has this form for the device."""
        weight = torch.nn.Parameter(torch.ones(2, device=lane.device))
        weight.grad = torch.ones_like(weight)
        try:
            self.make([weight]).step()
        except (RuntimeError, NotImplementedError, AssertionError):
            return False
        return True

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *self.options, self.way])


_CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {}),
    (Adam, {"amsgrad": True}),
    (AdamW, {}),
    (Adagrad, {}),
]
FORMS = [Form(cls, options, way) for cls, options in _CLASSES for way in ("for-loop", "foreach", "fused", "auto")]
FORMS += [Form(RMSprop, {"momentum": 0.9}, way) for way in ("for-loop", "foreach", "capturable")]
FORMS += [Form(Adam, {"amsgrad": True}, "capturable"), Form(AdamW, {}, "capturable")]

FEW = [Form(SGD, {"momentum": 0.9}, "for-loop"), Form(Adam, {"amsgrad": True}, "auto")]
"""Two forms: for one the host decides whether to step; the other is fused where the device allows it."""

FUSIBLE: dict[str, Any] = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if isinstance(cls, type) and issubclass(cls, Optimizer) and "fused" in inspect.signature(cls).parameters
}
"""By name, the classes of this torch that take ``fused=``."""


def row_of(setting: str) -> Level:
    """The level of one of :data:`SETTINGS`."""
    return LEVELS[setting.partition("-")[0]]


def stepped_as(setting: str) -> torch.dtype:
    """What the optimizer steps: fp32, or the level's dtype where it has no masters."""
    row = row_of(setting)
    return getattr(torch, str(row.dtype)) if row.steps_lower else torch.float32


def begin(lane: Lane, setting: str, form: Form, **options: Any) -> Pair:
    """Make a model at one of :data:`SETTINGS` and its twin, stepped by the same form.

    The twin is fp32; at a level without masters for what it casts, it is of the level's dtype as the model is.
    """
    form.need(lane)
    row, told = row_of(setting), {**SETTINGS[setting], **options}
    half = row.steps_lower
    pair = start(lane, row.name, lambda params: form.make(params, half), **told)
    if not half:
        return pair
    pair.plain_model.to(stepped_as(setting))
    return dataclasses.replace(pair, plain_optimizer=form.make(pair.plain_model.parameters(), half))
