"""The formats of a saved state: xamp's own, and those of the other loss scalers that users change from or to.

:func:`read` turns a state of any format into a :class:`Saved`, or says which key is wrong. :func:`write` and
:func:`write_foreign` make states. Nothing here knows a session. A state holds numbers, strings and CPU tensors in plain
dicts and lists, so that ``torch.load(weights_only=True)`` takes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict

import torch

from xamp.errors import CheckpointError
from xamp.ground.shown import said, shown
from xamp.policy import LARGEST_SCALE

__all__ = [
    "FOREIGN",
    "FORMATS",
    "SCHEMA",
    "Saved",
    "SavedOptimizer",
    "SavedScale",
    "SavedScaler",
    "SessionState",
    "read",
    "write",
    "write_foreign",
]

SCHEMA = 1
FOREIGN = ("torch", "torch_npu")
FORMATS = ("xamp", *FOREIGN)
_TORCH = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_STATIC_INTERVAL = 2**31 - 1  # the largest int32, because torch's growth tracker is an int32
_KINDS = "xamp.state_dict(), torch.amp.GradScaler, apex.amp and torch_npu's GradScaler"
_Read: TypeAlias = Callable[[Any, str], Any]
"""Checks a value under a key, which it gets for errors, and returns it."""


@dataclasses.dataclass(frozen=True)
class SavedScale:
    """One loss scale.

    Attributes:
        scale: the loss scale, above 0.
        growth_tracker: clean updates since the scale last moved.
        dynamic: whether the scale is dynamic; None where the format does not say.
        factors: growth factor, backoff factor and growth interval; None where the format does not have them.
    """

    scale: float
    growth_tracker: int
    dynamic: bool | None = True
    factors: tuple[float, float, int] | None = None


@dataclasses.dataclass(frozen=True)
class Saved:
    """A state, checked for everything that can be checked without a session.

    Attributes:
        scales: the loss scales, by ``loss_id``.
        masters: for each model, fp32 master weights by qualified name.
        others: for each optimizer, masters whose parameters are in no model, by ``"group.position"``.
        overflow_runs: for each optimizer, the overflows in a row that no smaller scale could cure.
        steps: numbers of applied and of skipped steps; None where the format does not say.
        level: level of the run that saved it; for messages.
        dtype: name of the lower dtype of that run; for messages.
    """

    scales: Sequence[SavedScale]
    masters: Sequence[Mapping[str, torch.Tensor]] = ()
    others: Sequence[Mapping[str, torch.Tensor]] = ()
    overflow_runs: Sequence[int] = ()
    steps: tuple[int, int] | None = None
    level: str = ""
    dtype: str = ""


# ---------------------------------------------------------------- writing


class SavedScaler(TypedDict):
    """One loss scale in a :class:`SessionState`."""

    dynamic: bool | None
    scale: float
    growth_tracker: int


class SavedOptimizer(TypedDict):
    """What a :class:`SessionState` holds of one optimizer."""

    overflow_run: int
    masters: dict[str, torch.Tensor]


class SessionState(TypedDict):
    """What ``xamp.state_dict`` returns in xamp's own format."""

    format: str
    schema: int
    level: str
    dtype: str
    steps: dict[str, int]
    scalers: list[SavedScaler]
    optimizers: list[SavedOptimizer]
    masters: list[dict[str, torch.Tensor]]


def write(saved: Saved) -> SessionState:
    """Return ``saved`` in xamp's own format."""
    applied, skipped = saved.steps or (0, 0)
    return {
        "format": "xamp",
        "schema": SCHEMA,
        "level": saved.level,
        "dtype": saved.dtype,
        "steps": {"applied": applied, "skipped": skipped},
        "scalers": [{"dynamic": s.dynamic, "scale": s.scale, "growth_tracker": s.growth_tracker} for s in saved.scales],
        "optimizers": [
            {"overflow_run": run, "masters": dict(others)}
            for run, others in zip(saved.overflow_runs, saved.others, strict=True)
        ],
        "masters": [dict(named) for named in saved.masters],
    }


def write_foreign(saved: SavedScale, kind: str) -> dict[str, Any]:
    """Return ``saved`` in the format of ``kind``: ``"torch"`` or ``"torch_npu"``.

    torch's scaler knows no static scale. With factors of 1 it skips a step that overflows and keeps the scale.
    """
    growth, backoff, interval = saved.factors if saved.dynamic and saved.factors else (1.0, 1.0, _STATIC_INTERVAL)
    state = {
        "scale": saved.scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": saved.growth_tracker,
    }
    return {**state, "dynamic": bool(saved.dynamic)} if kind == "torch_npu" else state


# ---------------------------------------------------------------- reading


def read(call: str, state: object) -> Saved:
    """Read a state of any known format.

    Args:
        call: the user's call, for messages.
        state: from :func:`write`, from torch's or torch_npu's GradScaler (a list of states for several losses), or from
            apex.amp.

    Raises:
        CheckpointError: the state has none of these formats, or a newer xamp wrote it, or a key is missing, unknown or
            has a value that cannot be right. The message names the key.
    """
    try:
        return _Reader(call).read(state)
    except CheckpointError:
        raise
    except Exception as error:  # a class of somebody else, which behaves unlike a dict or a number
        raise CheckpointError(f"{call}: the state cannot be read: {said(error)}. Nothing was loaded.") from error


class _Reader:
    """Reads one state. Every error message begins with the call."""

    def __init__(self, call: str) -> None:
        self._call = call

    def read(self, state: object) -> Saved:
        if isinstance(state, (list, tuple)) and state:
            return Saved([self._torch(one, f"[{i}]") for i, one in enumerate(state)])
        found = self._mapping(state, "")
        if not found:
            raise self._error("the state is empty, perhaps saved from a disabled GradScaler")
        keys = set(found)
        if "format" in keys or "schema" in keys:
            return self._ours(found)
        if keys & _TORCH:
            return Saved([self._torch(found, "")])
        if any(str(key).startswith("loss_scaler") for key in keys):
            return Saved(self._apex(found))
        listed = ", ".join(sorted(map(shown, keys))[:6])
        raise self._error(f"no known format has the keys {listed}. What can be read is the state of {_KINDS}")

    def _ours(self, state: Mapping[str, Any]) -> Saved:
        schema = state.get("schema")
        if state.get("format") != "xamp" or not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise self._error(f"not a state of xamp: format={shown(state.get('format'))}, schema={shown(schema)}")
        if schema > SCHEMA:
            raise self._error(
                f"'schema' is {schema}, from a newer xamp; this one reads up to {SCHEMA}. Upgrade xamp, or save with "
                "this one"
            )
        scale = partial(self._fields, dynamic=self._flag, scale=self._scale, growth_tracker=self._count)
        optimizer = partial(self._fields, overflow_run=self._count, masters=self._masters)
        found = self._fields(
            *(state, ""),
            format=self._word,
            schema=self._count,
            level=self._word,
            dtype=self._word,
            steps=partial(self._fields, applied=self._count, skipped=self._count),
            scalers=partial(self._list, read=scale),
            optimizers=partial(self._list, read=optimizer),
            masters=partial(self._list, read=self._masters),
        )
        return Saved(
            [SavedScale(**each) for each in found["scalers"]],
            found["masters"],
            [each["masters"] for each in found["optimizers"]],
            [each["overflow_run"] for each in found["optimizers"]],
            (found["steps"]["applied"], found["steps"]["skipped"]),
            found["level"],
            found["dtype"],
        )

    def _torch(self, value: object, key: str) -> SavedScale:
        state = self._mapping(value, key)
        found = self._fields(
            *(state, key, True),  # torch reads five keys; a subclass may have more
            scale=self._scale,
            growth_factor=self._scale,
            backoff_factor=self._scale,
            growth_interval=partial(self._count, below=2**63),
            _growth_tracker=self._count,
        )
        dynamic = self._flag(state.get("dynamic", True), f"{key}['dynamic']")
        factors = found["growth_factor"], found["backoff_factor"], found["growth_interval"]
        return SavedScale(found["scale"], found["_growth_tracker"], dynamic, factors)

    def _apex(self, state: Mapping[str, Any]) -> list[SavedScale]:
        scale = partial(self._fields, loss_scale=self._scale, unskipped=self._count)
        names = [f"loss_scaler{i}" for i in range(len(state))]  # in order of the numbers, not of the keys in the file
        found = self._fields(state, "", **dict.fromkeys(names, scale))
        return [SavedScale(each["loss_scale"], each["unskipped"], dynamic=None) for each in found.values()]

    # ---------------------------------------------------------------- single values

    def _error(self, what: str, key: str = "") -> CheckpointError:
        where = f"state{key}: " if key else ""
        return CheckpointError(f"{self._call}: {where}{what}. Nothing was loaded.")

    def _fields(self, value: object, key: str, others: bool = False, /, **wanted: _Read) -> dict[str, Any]:
        """Read a dict that has the keys of ``wanted``, each by its function; ``others``: it may have more."""
        found = self._mapping(value, key)
        missing = sorted(wanted.keys() - found.keys())
        unknown = sorted(map(str, found.keys() - wanted.keys()))
        if missing:
            raise self._error(f"the key {missing[0]!r} is missing", key)
        if unknown and not others:
            raise self._error(f"unknown key {unknown[0]!r}", key)
        return {name: read(found[name], f"{key}[{name!r}]") for name, read in wanted.items()}

    def _mapping(self, value: object, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            what = f"must be a dict, and is {type(value).__name__}. What can be read is the state of {_KINDS}"
            raise self._error(what, key or " itself")
        return value

    def _list(self, value: object, key: str, read: _Read) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise self._error(f"must be a list, and is {type(value).__name__}", key)
        return [read(each, f"{key}[{i}]") for i, each in enumerate(value)]

    def _word(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            raise self._error(f"must be a string, and is {type(value).__name__}", key)
        return value

    def _scale(self, value: object, key: str) -> float:
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        if not 2.0**-149 <= number <= LARGEST_SCALE:  # fp32's range with subnormals, which a collapsed run may leave
            raise self._error(f"must be a finite number above 0 that fp32 can hold, and is {_shown(value)}", key)
        return float(number)

    def _count(self, value: object, key: str, below: int = 2**31) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
            bound = f"2**{below.bit_length() - 1} - 1"
            raise self._error(f"must be a whole number from 0 to {bound}, and is {_shown(value)}", key)
        return value

    def _flag(self, value: object, key: str) -> bool:
        if not isinstance(value, bool):
            raise self._error(f"must be True or False, and is {shown(value)}", key)
        return value

    def _masters(self, value: object, key: str) -> Mapping[str, torch.Tensor]:
        found = self._mapping(value, key)
        for name, tensor in found.items():
            inner = f"{key}[{shown(name)}]"
            if not isinstance(name, str):
                raise self._error("a name must be a string", inner)
            problem = _unfit(tensor)
            if problem:
                raise self._error(f"must be a dense fp32 tensor, and is {problem}", inner)
        return found


def _unfit(value: object) -> str:
    """Return why ``value`` cannot be copied into an fp32 tensor; an empty string where it can."""
    # A subclass of Tensor, such as a sharded DTensor, copies in its own way.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"of type {type(value).__name__}"
    assert isinstance(value, torch.Tensor)
    if value.layout is not torch.strided or value.is_nested:
        return f"{value.layout}, nested" if value.is_nested else str(value.layout)
    if value.is_meta:
        return "on the device 'meta', which holds no numbers"
    return "" if value.dtype == torch.float32 else str(value.dtype)


def _shown(value: object) -> str:
    """Return ``repr(value)``, or the size of an integer so long that Python refuses to print it."""
    if type(value) is int and abs(value) >> 64:
        return f"a number of {value.bit_length()} bits"
    return shown(value)
