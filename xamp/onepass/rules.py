"""The rules by which optimizers step, the rows of a plan, and the numbers that a rule takes from a group's options."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CODES", "NONE", "Row", "Rule", "fault", "layout", "numbers", "record", "takes"]

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NONE = 3
"""The code of a tensor that is not there."""
_STATES = {"sgd": (0, 1), "adam": (2, 3), "adagrad": (1,), "lamb": (2,), "novograd": (2,)}
_COUNTED = ("adam", "lamb", "novograd")
_FLAGS = {"maximize": 1, "nesterov": 2, "amsgrad": 4, "bias_correction": 16, "grad_averaging": 32, "first": 64}
_ON = ("bias_correction", "grad_averaging")
_DECOUPLED, _NVLAMB, _AFTER, _INIT_ZERO, _LARGEST, _WHOLE = 8, 128, 256, 512, 1024, 2048


@dataclass(frozen=True)
class Rule:
    """What a plan computes. What torch and Apex keep in the groups is read from there at each step.

    Options of a group, by the names that torch.optim and Apex give them (others are ignored): ``lr`` (a number, or an
    fp32 tensor on the device, which the kernels read there), ``weight_decay``, ``maximize``; ``momentum``,
    ``dampening``, ``nesterov``; ``betas``, ``eps``, ``amsgrad``, ``bias_correction``, ``grad_averaging``;
    ``lr_decay``; ``norm_type``, ``init_zero``. Those that are missing have torch's, or Apex's, default. Two more:
    ``step``, a number or an fp32 or int32 tensor on the device: the count of the step to take, from 1, for rows that
    have no ``step`` of their own; ``first``: the rows of this group have not been stepped yet (SGD: the momentum
    becomes the gradient, whatever the state holds; NovoGrad: so does the norm), where they have no ``step``.

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


@dataclass(frozen=True)
class Row:
    """A tensor to step, with what belongs to it. All have one device, shape and order in memory (see :func:`takes`).

    Attributes:
        param: what is stepped: the fp32 master, or the parameter itself (fp32, fp16, bf16).
        low: the fp16 or bf16 weight into which the stepped value is written too, or None.
        states: of the rule, all of one dtype (fp32 as a rule), NovoGrad's norm excepted.
        step: the count of this row's steps taken so far, fp32 with one element, on the device; the step adds 1 unless
            it is skipped. No two rows share it. None: the group's options say it, or the rule needs none. With SGD it
            serves to know the first step, whose momentum is the gradient.
        group: index into the options that each step is given. Groups may be cut as is handy, by ``first`` for example.
    """

    param: torch.Tensor
    low: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] = ()
    step: torch.Tensor | None = None
    group: int = 0


def takes(tensor: torch.Tensor) -> bool:
    """Whether kernels can go over this tensor's memory: fp32, fp16 or bf16, strided, dense (any order of dimensions).

    Views and unaligned tensors are taken, tensors with gaps or with elements that share memory are not. What the class
    of a subclass means (a shard, a wrapper) is for the caller to know.
    """
    if tensor.layout != torch.strided or tensor.dtype not in CODES or tensor.is_neg() or tensor.device.type == "meta":
        return False
    expected = 1
    for stride, size in sorted(layout(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the strides and sizes that say where elements lie: those of dimensions with more than one element."""
    if not tensor.numel():
        return []
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def fault(rule: Rule, row: Row, device: torch.device) -> str:
    """Say why the kernels cannot step this row; the empty string where they can."""
    if rule.name not in _STATES:
        return f"there is no rule {rule.name!r}; there are {', '.join(_STATES)}"
    if len(row.states) not in _STATES[rule.name]:
        return f"{rule.name} has {' or '.join(map(str, _STATES[rule.name]))} states, not {len(row.states)}"
    own = row.states[:1] if rule.name == "novograd" else row.states
    for tensor in (row.param, *((row.low,) if row.low is not None else ()), *own):
        if not takes(tensor) or tensor.device != device:
            return f"it is not a dense tensor of fp32, fp16 or bf16 on {device}: {tensor.dtype} on {tensor.device}"
        if tensor.shape != row.param.shape or layout(tensor) != layout(row.param):
            return "its tensors differ in shape or in their order in memory"
    if len({state.dtype for state in own}) > 1 or (rule.name == "lamb" and own[0].dtype != torch.float32):
        return "its states are of two dtypes, or LAMB's are not fp32"
    for single in (*row.states[len(own) :], *((row.step,) if row.step is not None else ())):
        if single.dtype != torch.float32 or single.numel() != 1 or single.device != device:
            return f"its count, or norm, is not one fp32 number on {device}"
    return ""


def record(rule: Rule, options: Mapping[str, Any], rows: Sequence[Row]) -> list[int]:
    """Return the options of a group as ten integers: seven fp64 in their bits, flags, pointers to rate and count.

    Raises:
        ValueError: a tensor that the kernels cannot read, or options for which the rows lack a state or a count.
    """
    flags = sum(bit for name, bit in _FLAGS.items() if options.get(name, name in _ON))
    flags |= _DECOUPLED * rule.decoupled | _NVLAMB * rule.use_nvlamb | _AFTER * rule.wd_after_momentum
    flags |= _INIT_ZERO * bool(options.get("init_zero")) | _LARGEST * (options.get("norm_type", 2) != 2)
    b1, b2 = options.get("betas", (options.get("momentum", 0.0), options.get("dampening", 0.0)))
    needed = {"sgd": {0, 1} if b1 == 0.0 else {1}, "adam": {3 if flags & _FLAGS["amsgrad"] else 2}}
    if any(len(row.states) not in needed.get(rule.name, _STATES[rule.name]) for row in rows):
        raise ValueError(f"{rule.name}: a row has another number of states than these options need: {dict(options)}")
    if rule.name in _COUNTED and "step" not in options and any(row.step is None for row in rows):
        raise ValueError(f"{rule.name}: a row has no count of steps, and the options have no 'step'")
    at = {"lr": 0, "step": 0}
    values = {"lr": options["lr"], "step": options.get("step", 0)}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and rows and value.device == rows[0].param.device:
            if value.dtype not in (torch.float32, torch.int32) or (name, value.dtype) == ("lr", torch.int32):
                raise ValueError(f"{name} is a tensor of {value.dtype}: the kernels read float32, of a count int32 too")
            at[name], values[name] = value.data_ptr(), 0.0
            flags |= _WHOLE * (value.dtype == torch.int32)
    decay, eps = options.get("weight_decay", 0.0), options.get("eps", 0.0)
    floats = (values["lr"], decay, b1, b2, eps, values["step"], options.get("lr_decay", 0.0))
    return [*struct.unpack("<7q", struct.pack("<7d", *map(float, floats))), flags, at["lr"], at["step"]]


def numbers(rule: Rule, record: Sequence[int], lr: float, step: float, first: bool, scale: float) -> list[float]:
    """Return what a step multiplies by, on the host: the twin of ``kernels.numbers``.

    Args:
        rule: see :class:`Rule`.
        record: of the group, from :func:`record`.
        lr: the learning rate.
        step: the count of the step to take, from 1.
        first: whether the row has not been stepped yet.
        scale: by which gradients are multiplied.
    """
    _, wd, b1, b2, eps, _, lr_decay = struct.unpack("<7d", struct.pack("<7q", *record[:7]))
    flags = record[7]
    scale, inside = (-scale if flags & 1 else scale), (0.0 if flags & _DECOUPLED else wd)
    outside, new, keep, weight, size, extra = wd - inside, 1.0 - b1, b2, 1.0 - b2, lr, 1.0 - lr * (wd - inside)
    kind = bool(flags & _FLAGS["amsgrad"])
    if rule.name == "sgd":
        outside = wd if flags & _AFTER else 0.0
        inside, weight = wd - outside, (b1 if flags & 2 else 0.0)
        new, keep = (1.0, 0.0) if first else (1.0 - b2, b1)
    elif rule.name == "adagrad":
        outside, size = extra, lr / (1.0 + (step - 1.0) * lr_decay)
    else:
        c1, root = (1.0 - b1**step, (1.0 - b2**step) ** 0.5) if flags & 16 else (1.0, 1.0)
        if rule.name == "adam":
            outside, size, eps = extra, lr * root / c1, eps * root
        else:
            new = new if flags & 32 else 1.0
            if rule.name == "lamb":
                size, eps, kind = root / c1, eps * root, bool(flags & _NVLAMB) or wd != 0.0
            else:
                kind = (first and not flags & _INIT_ZERO) + 2 * bool(flags & _LARGEST) + 4 * (not flags & _DECOUPLED)
                size, extra = 1.0 / c1, root
    return [scale, inside, outside, new, keep, weight, size, eps, b1, lr, extra, float(kind)]
