"""The rules by which optimizers step, the rows of a plan, and the numbers that a rule takes from a group's options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = [
    "CODES",
    "STATES",
    "Row",
    "Rule",
    "by_largest",
    "is_like",
    "lies_on",
    "options_of",
    "takes",
    "unread",
    "vectors_of",
]

CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""By dtype, its code in the tables of the kernels."""

STATES = {"sgd": (0, 1), "adam": (2, 3), "adagrad": (1,), "lamb": (2,), "novograd": (2,)}
_SCALARS = {torch.float32: 1, torch.float64: 4, torch.int32: 5}

_NUMBERS = ("eps", "momentum", "dampening", "nesterov", "maximize", "amsgrad")
_MORE = ("bias_correction", "grad_averaging", "lr_decay", "init_zero", "first")
_OPTIONS = ("lr", "weight_decay", "betas", *_NUMBERS, *_MORE, "norm_type", "step")
_DEFAULTS = {"eps": 1e-8, "bias_correction": True, "grad_averaging": True}  # others are 0


class Rule(NamedTuple):
    """The rule by which a plan steps. What torch and Apex keep in the groups is read from there at each step.

    Options of a group have the names that torch.optim and Apex give them; those that are missing have their defaults,
    others are ignored. ``lr`` is a number, or a tensor that is read on the device. Two more: ``step``, a number or
    a tensor on the device: the count of the step to take, from 1, for rows that have no ``step`` of their own;
    ``first``: such rows have not been stepped yet (the momentum of SGD and the norm of NovoGrad are the gradient's).

    Attributes:
        name: ``"sgd"`` (states: the momentum, or none where ``momentum`` is 0), ``"adam"`` (two moments; the largest
            second one where ``amsgrad`` is set), ``"adagrad"`` (the sum of squares), ``"lamb"`` (two moments, fp32),
            ``"novograd"`` (the first moment; the moving norm, fp32 with one element).
        decoupled: the weight decay shrinks the parameter (AdamW, Apex's ``adam_w_mode``, ``adagrad_w_mode``; NovoGrad:
            not ``reg_inside_moment``) and is not added to the gradient.
        use_nvlamb: LAMB scales updates by the ratio of norms also where the weight decay is 0.
        wd_after_momentum: SGD adds the weight decay to the update, not to the gradient.
    """

    name: str
    decoupled: bool = False
    use_nvlamb: bool = False
    wd_after_momentum: bool = False


class Row(NamedTuple):
    """A tensor to step, with what belongs to it. All have one device, shape and order in memory (see :func:`takes`).

    Attributes:
        param: what is stepped: the fp32 master, or the parameter itself (fp32, fp16, bf16).
        low: the fp16 or bf16 weight into which the stepped value is written too, or None.
        states: of the rule, all of one dtype (fp32 as a rule), NovoGrad's norm excepted.
        step: the count of this row's steps so far, fp32 with one element, on the device, to which a step adds 1. No two
            rows share it. None: the group's options say it. With SGD it tells the first step.
        group: index into the options that each step is given.
        in_place: its gradient belongs to others, who read it: what checks and clips it changes it in place.
    """

    param: torch.Tensor
    low: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] = ()
    step: torch.Tensor | None = None
    group: int = 0
    in_place: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the row."""
        return [each for each in (self.param, self.low, *self.states, self.step) if each is not None]


def vectors_of(rule: str, row: Row) -> tuple[torch.Tensor, ...]:
    """Return the states of a row that have an element for each of the parameter's: NovoGrad's norm has one in all."""
    return row.states[:1] if rule == "novograd" else row.states


def takes(tensor: torch.Tensor) -> bool:
    """Whether kernels can go over this tensor's memory: fp32, fp16 or bf16, strided, dense (any order of dimensions).

    Views and unaligned tensors are taken, tensors with gaps or with elements that share memory are not. What the class
    of a subclass means (a shard, a wrapper) is for the caller to know.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in CODES or tensor.is_neg() or tensor.is_meta:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_like(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie in the order of those of ``param``, on the same device."""
    if tensor.shape != param.shape or tensor.device != param.device or not takes(tensor):
        return False
    pairs = zip(tensor.stride(), param.stride(), tensor.shape, strict=True)
    return tensor.numel() < 2 or all(one == other for one, other, size in pairs if size > 1)


def options_of(group: Mapping[str, Any], device: torch.device) -> tuple[list[float], list[int]]:
    """Return the options of a group as the kernels read them: fp64 numbers, then addresses and codes of tensors."""
    lr, count = group.get("lr", 1e-3), group.get("step", 0)
    first = [0.0 if lies_on(lr, device) else lr, group.get("weight_decay", 0.0), *group.get("betas", (0.9, 0.999))]
    named = [group.get(name, _DEFAULTS.get(name, 0.0)) for name in _NUMBERS + _MORE]
    numbers = [*first, *named, by_largest(group), 0.0 if lies_on(count, device) else count]
    return [float(number) for number in numbers], [*_place(lr, device), *_place(count, device)]


def unread(group: Mapping[str, Any], device: torch.device) -> str:
    """Say in one line which option would let each step wait for the device; the empty string where none would."""
    for name in _OPTIONS:
        value = group.get(name)
        if isinstance(value, (int, float)):  # the usual case
            continue
        for one in value if isinstance(value, (tuple, list)) else (value,):
            is_read = name in ("lr", "step") and lies_on(one, device)
            if isinstance(one, torch.Tensor) and not one.is_cpu and not is_read:
                return (
                    f"{name} is a tensor in {one.dtype} on {one.device}; kernels read lr there, in fp32 or fp64, and "
                    "all other options as numbers"
                )
    return ""


def by_largest(group: Mapping[str, Any]) -> bool:
    """Whether NovoGrad's norm of a tensor is its largest magnitude."""
    return group.get("norm_type", 2) in (0, math.inf)


def lies_on(value: Any, device: torch.device) -> bool:
    """Whether the kernels read ``value`` where it lies; any other is a number for them."""
    return isinstance(value, torch.Tensor) and value.device == device and value.dtype in _SCALARS


def _place(value: Any, device: torch.device) -> tuple[int, int]:
    return (value.data_ptr(), _SCALARS[value.dtype]) if lies_on(value, device) else (0, 0)
