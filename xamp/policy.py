"""Levels and overrides, compiled into one frozen :class:`Policy`.

A request is a handful of strings, booleans and numbers, often straight from argparse. :func:`compile_policy` checks it
and turns it into a policy once. No later code reads an option again. This module imports no torch at module level.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from xamp.errors import PolicyError
from xamp.values import arguments
from xamp.values.shown import shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "LARGEST_SCALE",
    "LEVELS",
    "SCALER_RANGES",
    "SMALLEST_SCALE",
    "Level",
    "Policy",
    "Request",
    "best_level",
    "compile_policy",
    "levels_where",
    "listed",
    "parse_level",
]


@dataclasses.dataclass(frozen=True)
class Level:
    """One row of the level table. It gives dtypes by name, so that the table needs no torch.

    Attributes:
        name: such as ``"O1"``.
        aliases: other names.
        dtype: the lower dtype, fp16 or bf16; None where everything is fp32.
        casts_parameters: xamp casts parameters and inputs (as O2 does) instead of the inputs of operators (as O1 does).
        master_weights: the optimizer steps fp32 copies of the low-precision parameters.
        keep_batchnorm_fp32: batch norm keeps fp32 parameters and statistics; None where the op policy decides.
        loss_scale: ``"dynamic"`` or a static scale.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str | None
    casts_parameters: bool
    master_weights: bool
    keep_batchnorm_fp32: bool | None
    loss_scale: str | float

    @property
    def casts_operators(self) -> bool:
        """Whether parameters stay fp32 and the op policy casts what operators are given."""
        return self.dtype is not None and not self.casts_parameters

    @property
    def steps_lower(self) -> bool:
        """Whether the optimizer steps parameters of the lower dtype, for there are no masters."""
        return self.casts_parameters and not self.master_weights

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.loss_scale == "dynamic"

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, and gradients are checked."""
        return self.loss_scale != 1.0

    @property
    def manages_gradients(self) -> bool:
        """Whether gradients are scaled, checked or moved to masters: whether steps are xamp's to decide."""
        return self.scales or self.master_weights


LEVELS = {
    level.name: level
    for level in (
        Level("O0", ("fp32",), None, False, False, True, 1.0),
        Level("O1", ("amp-fp16",), "float16", False, False, None, "dynamic"),
        Level("O2", (), "float16", True, True, True, "dynamic"),
        Level("O3", ("fp16",), "float16", True, False, False, 1.0),
        Level("O4", ("amp-bf16",), "bfloat16", False, False, None, 1.0),
        Level("O5", (), "bfloat16", True, True, True, 1.0),
    )
}
_BY_ALIAS = {alias.lower(): level for level in LEVELS.values() for alias in (level.name, *level.aliases)}
_ON_STATIC_OVERFLOW = ("skip", "step")
_FP8 = ("fp8", "amp-fp8")  # spellings of O4 with fp8="auto"
SMALLEST_SCALE = 2.0**-126
"""fp32's smallest normal number. The inverse of a much smaller scale is inf: it makes gradients inf, unnoticed."""

LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127
"""fp32's largest number."""

SCALER_RANGES = {  # lower bound, upper bound, whether a whole number
    "num_losses": (0, 2.0**31, True),
    "init_scale": (SMALLEST_SCALE, math.inf, False),
    "growth_factor": (1, math.inf, False),
    "backoff_factor": (0, 1, False),
    "growth_interval": (0, 2.0**31, True),
    "min_loss_scale": (SMALLEST_SCALE, 2.0**127, False),
    "max_loss_scale": (SMALLEST_SCALE, 2.0**127, False),
}


class Unsaid(str):
    """A default that the caller can tell from the same text given on purpose."""

    __slots__ = ()


_OP_POLICY = Unsaid("portable")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of ``initialize`` that shape a policy, as they were given. Their defaults are written here only."""

    level: Any = "auto"
    loss_scale: Any = None
    dtype: Any = None
    keep_batchnorm_fp32: Any = None
    keep_fp32: Any = ()
    master_weights: Any = None
    cast_model_inputs: Any = True
    cast_model_outputs: Any = None
    methods: Any = ("forward",)
    num_losses: Any = 1
    init_scale: Any = 2.0**16
    growth_factor: Any = 2.0
    backoff_factor: Any = 0.5
    growth_interval: Any = 2000
    min_loss_scale: Any = 1.0
    max_loss_scale: Any = 2.0**24
    on_static_overflow: Any = None
    op_policy: Any = _OP_POLICY
    fused: Any = "auto"
    fp8: Any = None
    keep_bf16: Any = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """The settings of a session, complete and checked. ``str(policy)`` is the line logged at verbosity 1.

    Attributes:
        level: the name of a row of :data:`LEVELS`; ``"auto"`` is resolved already.
        dtype: the lower dtype; ``torch.float32`` where there is none.
        casts_parameters: see :class:`Level`.
        autocast: while the model runs, the op policy decides in which dtype each operator runs; see
            :attr:`Level.casts_operators`.
        input_dtype: dtype to which floating arguments of the model are cast; None: they are not cast.
        excluded_inputs: names of arguments, and types, that are not cast.
        master_weights: see :class:`Level`.
        keep_batchnorm_fp32: see :class:`Level`; ``"affine"``: only batch norm modules that have weights stay fp32.
        keep_fp32: module classes, qualified names and glob patterns of modules that stay fp32.
        output_dtype: dtype to which floating outputs are cast; None: they are not cast.
        methods: the model's methods that run under the policy.
        dynamic: the loss scale is dynamic.
        static_scale: the loss scale where it is not dynamic.
        checks: gradients are checked for inf and nan, and a step that overflowed is skipped.
        op_policy: name of the table that says which operator runs in which dtype.
        fused: ``"auto"``, ``"one-pass"``, True or False.
        num_losses, init_scale, growth_factor, backoff_factor, growth_interval, min_loss_scale, max_loss_scale, fp8,
            keep_bf16: see :func:`xamp.initialize`.
    """

    level: str
    dtype: torch.dtype
    casts_parameters: bool
    autocast: bool
    input_dtype: torch.dtype | None
    master_weights: bool
    keep_batchnorm_fp32: bool | str | None
    keep_fp32: tuple[type | str, ...]
    output_dtype: torch.dtype | None
    methods: tuple[str, ...]
    dynamic: bool
    static_scale: float
    checks: bool
    op_policy: str
    fused: str | bool
    num_losses: int
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_loss_scale: float
    max_loss_scale: float
    excluded_inputs: tuple[type | str, ...] = ()
    fp8: str | None = None
    keep_bf16: tuple[type | str, ...] | None = None
    fp8_gains_from: float | None = None

    @functools.cached_property  # read several times a step
    def scales(self) -> bool:
        """Whether the loss is multiplied by a scale other than 1.0, or gradients are checked."""
        return self.checks or self.static_scale != 1.0

    @functools.cached_property
    def manages_gradients(self) -> bool:
        """Whether gradients are scaled, checked or moved to masters. If not, ``scale_loss`` has nothing to do."""
        return self.scales or self.master_weights

    @property
    def apart(self) -> bool:
        """Whether a cast mode that is active around the model's forward (an autocast) has no effect inside it."""
        return True

    @property
    def spares_buffers(self) -> bool:
        """Whether scalar buffers stay fp32 where others are cast, and buffers that lose digits are named."""
        return True

    @property
    def loss_scale(self) -> str | float:
        """``"dynamic"`` or the static scale, as ``initialize`` takes them."""
        return "dynamic" if self.dynamic else self.static_scale

    def __str__(self) -> str:
        parts = [f"level {self.level}", f"dtype {_short(self.dtype)}"]
        parts.append("parameters cast" if self.casts_parameters else f"op policy {self.op_policy}")
        parts += [f"linear layers in fp8 ({self.fp8})"] if self.fp8 else []
        if self.master_weights:
            parts.append("fp32 master weights")
        if self.casts_parameters and self.keep_batchnorm_fp32:
            parts.append("batch norm fp32")
        if self.keep_fp32:
            names = ", ".join(k if isinstance(k, str) else k.__name__ for k in self.keep_fp32)
            parts.append(f"kept fp32: {names}")
        scale = f"dynamic from {self.init_scale:g}" if self.dynamic else f"static {self.static_scale:g}"
        parts.append(f"loss scale {scale}")
        parts.append(f"outputs {_short(self.output_dtype) if self.output_dtype else 'as they come'}")
        return ", ".join(parts)


def parse_level(level: object, *, call: str = "initialize") -> Level | None:
    """Return the row of the level table that ``level``, an argument of the public ``call``, names; None for ``"auto"``.

    Raises:
        PolicyError: no level has that name.
    """
    key = _spelt(level)
    if key == "auto":
        return None
    found = LEVELS["O4"] if key in _FP8 else _BY_ALIAS.get(key) if key else None
    if found is None:
        hint = "  The prefix is the letter O, not the digit zero." if key and key.startswith("0") else ""
        choices = ", ".join(f"'{name}'" for row in LEVELS.values() for name in (row.name, *row.aliases)) + ", 'fp8'"
        raise PolicyError(f"{call}(level={shown(level)}): no such level. Choices: 'auto', {choices}.{hint}")
    return found


def _spelt(level: object) -> str | None:
    return level.strip().lower() if isinstance(level, str) else None


def levels_where(condition: Callable[[Level], bool]) -> tuple[str, ...]:
    """The names of the levels for whose row ``condition`` is true, in the order of the table."""
    return tuple(name for name, row in LEVELS.items() if condition(row))


def best_level(fast_dtypes: Collection[str]) -> Level:
    """What ``"auto"`` means where ``fast_dtypes`` are native: operators cast to bfloat16, or to float16, or fp32."""
    dtype = next((dtype for dtype in ("bfloat16", "float16") if dtype in fast_dtypes), None)
    return next(row for row in LEVELS.values() if row.dtype == dtype and not row.casts_parameters)


WHY_BEST = {
    None: "no dtype below float32 is native to this device: lower ones run, but save little time",
    "float16": "float16 is native to this device and bfloat16 is not; the loss is scaled, for float16's range is small",
    "bfloat16": "bfloat16 is native to this device; it has float32's range, so the loss needs no scale",
}
"""By the dtype of the level that ``"auto"`` means: why it means that."""


def listed(names: Sequence[str], last: str = "or") -> str:
    """``names`` as a sentence has them, with ``last`` before the last one: ``"O2, O3 or O5"``."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def compile_policy(request: Request, level: Level, op_policies: Sequence[str]) -> Policy:
    """Apply the overrides of ``request`` to ``level`` and check the result.

    Args:
        request: the arguments as given.
        level: the level asked for, ``"auto"`` already resolved.
        op_policies: names of all op policies.

    Raises:
        PolicyError: an argument cannot be right, alone or together with the others.
    """
    dtype = _lower_dtype(request.dtype, level)
    masters, keep_bn = _parameter_overrides(request, level)
    autocast = level.casts_operators
    fp8, keep_bf16 = _fp8(request, level, dtype)
    casts_inputs, excluded_inputs = arguments.cast_inputs(request.cast_model_inputs)
    dynamic, static_scale = _loss_scale(request.loss_scale, level)
    return Policy(
        level=level.name,
        dtype=dtype,
        casts_parameters=level.casts_parameters,
        autocast=autocast,
        input_dtype=dtype if casts_inputs and not autocast else None,
        master_weights=masters,
        keep_batchnorm_fp32=keep_bn,
        keep_fp32=arguments.keep("keep_fp32", request.keep_fp32),
        output_dtype=arguments.output_dtype(request.cast_model_outputs),
        methods=arguments.methods(request.methods),
        dynamic=dynamic,
        static_scale=static_scale,
        checks=_checks(request.on_static_overflow, dynamic, static_scale),
        op_policy=arguments.choice("op_policy", request.op_policy, tuple(op_policies)),
        fused=arguments.fused(request.fused),
        excluded_inputs=excluded_inputs,
        fp8=fp8,
        keep_bf16=keep_bf16,
        **_scaler_numbers(request),
    )


def _parameter_overrides(request: Request, level: Level) -> tuple[bool, bool | None]:
    """Return ``master_weights`` and ``keep_batchnorm_fp32`` of the policy."""
    masters = arguments.boolean("master_weights", request.master_weights)
    keep_bn = arguments.boolean("keep_batchnorm_fp32", request.keep_batchnorm_fp32)
    if masters and not level.casts_parameters:
        having = levels_where(lambda row: row.master_weights)
        raise PolicyError(
            f"initialize(level={level.name!r}, master_weights=True): at {level.name} the parameters are fp32, so there "
            f"is nothing to keep masters of. Leave master_weights out, or use {listed(having)}."
        )
    if keep_bn is not None and level.casts_operators:
        casting = levels_where(lambda row: row.casts_parameters)
        raise PolicyError(
            f"initialize(level={level.name!r}, keep_batchnorm_fp32={shown(request.keep_batchnorm_fp32)}): at "
            f"{level.name} all parameters are fp32 and the op policy chooses batch norm's dtype. Leave "
            f"keep_batchnorm_fp32 out, or use {listed(casting)}; to run batch norm in fp32, "
            "keep_fp32=[torch.nn.modules.batchnorm._BatchNorm]."
        )
    if level.dtype is None:
        keep_bn = True
    return (
        level.master_weights if masters is None else masters,
        level.keep_batchnorm_fp32 if keep_bn is None else keep_bn,
    )


def _fp8(request: Request, level: Level, dtype: torch.dtype) -> tuple[str | None, tuple[type | str, ...] | None]:
    """Return ``fp8`` and ``keep_bf16`` of the policy; a recipe of ``"auto"`` stays so until the device is known."""
    if request.fp8 is None and request.keep_bf16 is None and _spelt(request.level) not in _FP8:
        return None, None
    from xamp.values import recipes  # a training without fp8 need not load it

    fits = level.casts_operators and f"torch.{level.dtype}" == str(dtype) == "torch.bfloat16"
    return recipes.read(request, _spelt(request.level) in _FP8, fits and parse_level(request.level) is not None)


def _lower_dtype(value: object, level: Level) -> torch.dtype:
    import torch

    if value is None:
        return torch.float32 if level.dtype is None else getattr(torch, level.dtype)
    dtype = arguments.dtype("dtype", value)
    if level.dtype is None and dtype != torch.float32:
        by_dtype: dict[str, list[str]] = {}
        for row in LEVELS.values():
            by_dtype.setdefault(row.dtype or "", []).append(row.name)
        lowering = ", ".join(f"{', '.join(names)} for {name}" for name, names in by_dtype.items() if name)
        raise PolicyError(
            f"initialize(level={level.name!r}, dtype={shown(value)}): {level.name} is fp32 throughout. Leave dtype "
            f"out, or choose the level that lowers to it: {lowering}."
        )
    if level.dtype is not None and dtype == torch.float32:
        raise PolicyError(
            f"initialize(level={level.name!r}, dtype={shown(value)}): {level.name} lowers to float16 or bfloat16. "
            f"For fp32 use level {best_level(()).name!r}."
        )
    return dtype


def _loss_scale(value: object, level: Level) -> tuple[bool, float]:
    """Return (dynamic, static scale) for a ``loss_scale`` argument; the static scale is 1.0 where dynamic."""
    if value is None:
        value = level.loss_scale
    if isinstance(value, str) and value.strip().lower() == "dynamic":
        return True, 1.0
    try:
        scale = arguments.number("loss_scale", value)
    except PolicyError:
        scale = math.nan
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise PolicyError(
            f"initialize(loss_scale={shown(value)}): a loss scale is 'dynamic' or a finite number above 0, such as "
            "128.0 (also as a string), that fp32 can hold. Leave it out for the level's own."
        )
    return False, scale


def _checks(on_static_overflow: object, dynamic: bool, static_scale: float) -> bool:
    """Return whether gradients are checked.

    A dynamic scale always checks. A static one does what the user asked; by default it checks unless it is 1.0.
    """
    if on_static_overflow is None:
        return dynamic or static_scale != 1.0
    return arguments.choice("on_static_overflow", on_static_overflow, _ON_STATIC_OVERFLOW) == "skip" or dynamic


def _scaler_numbers(request: Request) -> dict[str, Any]:
    """Return the numbers of the loss scalers, checked against their ranges. A bound of None gets its default."""
    if request.min_loss_scale is None:
        request = dataclasses.replace(request, min_loss_scale=Request.min_loss_scale)
    if request.max_loss_scale is None:
        request = dataclasses.replace(request, max_loss_scale=Request.max_loss_scale)
    numbers = {
        name: arguments.number_between(name, getattr(request, name), low, high, whole=whole)
        for name, (low, high, whole) in SCALER_RANGES.items()
    }
    if numbers["min_loss_scale"] > numbers["max_loss_scale"]:
        raise PolicyError(
            f"initialize(min_loss_scale={request.min_loss_scale!r}, max_loss_scale={request.max_loss_scale!r}): the "
            "floor is above the ceiling. Raise max_loss_scale or lower min_loss_scale."
        )
    return numbers


def _short(dtype: torch.dtype) -> str:
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[str(dtype).removeprefix("torch.")]
