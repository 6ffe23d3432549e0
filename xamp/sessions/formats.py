"""The formats of a saved state: xamp's own, and those of the other loss scalers that users change from or to.

:func:`read` turns a state of any format into a :class:`SessionState`, or says which key is wrong; :func:`write_foreign`
makes one of another format. Nothing here knows a session. A state holds numbers, strings and CPU tensors in dicts
and lists, so that ``torch.load(weights_only=True)`` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from xamp.errors import CheckpointError
from xamp.policy import LARGEST_SCALE
from xamp.values.shown import said, shown

if TYPE_CHECKING:
    from xamp.scaling.scale import ScaleRules

__all__ = [
    "FORMATS",
    "SCHEMA",
    "ReadScaler",
    "SavedOptimizer",
    "SavedScaler",
    "SessionState",
    "read",
    "write_foreign",
]

SCHEMA = 1
FORMATS = ("xamp", "torch", "torch_npu")
_TORCH = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_STATIC_INTERVAL = 2**31 - 1  # the largest int32, because torch's growth tracker is an int32
_KINDS = "xamp.state_dict(), torch.amp.GradScaler, apex.amp and torch_npu's GradScaler"

_Read: TypeAlias = Callable[[Any, str], Any]
"""Checks a value under a key, which it gets for errors, and returns it."""


class SavedScaler(TypedDict):
    """One loss scale: whether it is dynamic (None: unknown), the scale, and clean updates since it last moved."""

    dynamic: bool | None
    scale: float
    growth_tracker: int


class ReadScaler(SavedScaler, total=False):
    """One loss scale of :func:`read`: of a GradScaler, with growth factor, backoff factor and growth interval."""

    factors: tuple[float, float, int]


class SavedOptimizer(TypedDict):
    """One optimizer: overflows in a row that no smaller scale could cure, and masters whose parameters no model has.

    These are by ``"group.position"``.
    """

    overflow_run: int
    masters: dict[str, torch.Tensor]


class _Fp8State(TypedDict, total=False):
    fp8: str


class SessionState(_Fp8State):
    """The state of ``xamp.state_dict`` in xamp's own format.

    ``masters`` are by qualified name, for each model. ``fp8`` says recipe and width of layers where there are some.
    """

    format: str
    schema: int
    level: str
    dtype: str
    steps: dict[str, int]
    scalers: list[SavedScaler]
    optimizers: list[SavedOptimizer]
    masters: list[dict[str, torch.Tensor]]


def write_foreign(saved: SavedScaler, rules: ScaleRules, kind: str) -> dict[str, Any]:
    """Return ``saved`` in the format of ``kind``: ``"torch"`` or ``"torch_npu"``.

    torch's scaler knows no static scale. With factors of 1 it skips a step that overflows and keeps the scale.
    """
    dynamic = bool(saved["dynamic"])
    state = {
        "scale": saved["scale"],
        "growth_factor": rules.growth_factor if dynamic else 1.0,
        "backoff_factor": rules.backoff_factor if dynamic else 1.0,
        "growth_interval": rules.growth_interval if dynamic else _STATIC_INTERVAL,
        "_growth_tracker": saved["growth_tracker"],
    }
    return {**state, "dynamic": dynamic} if kind == "torch_npu" else state


# ---------------------------------------------------------------- reading


def read(call: str, state: object) -> SessionState:
    """Read a state of any known format, and check all that can be checked without a session.

    Args:
        call: the user's call, for messages.
        state: of xamp's own format, of torch's or torch_npu's GradScaler (a list of states for several losses), or of
            apex.amp.

    Returns:
        Of a state that is not xamp's: scalers only; ``steps`` is empty.

    Raises:
        CheckpointError: the state has none of these formats, or a newer xamp wrote it, or a key is missing, unknown or
            has a value that cannot be right. The message names the key.
    """
    try:
        return _read(state)
    except Exception as error:  # also of a class of somebody else, which behaves unlike a dict or a number
        why, cause = (
            (str(error), None) if isinstance(error, _Misfit) else (f"the state cannot be read: {said(error)}", error)
        )
        raise CheckpointError(f"{call}: {why}. Nothing was loaded.") from cause


class _Misfit(Exception):
    """Says which key of a state is wrong."""

    def __init__(self, what: str, key: str = "") -> None:
        super().__init__(f"state{key}: {what}" if key else what)


def _read(state: object) -> SessionState:
    if isinstance(state, (list, tuple)) and state:
        return _of_scalers([_torch(one, f"[{i}]") for i, one in enumerate(state)])
    found = _mapping(state, "")
    if not found:
        raise _Misfit("the state is empty, perhaps saved from a disabled GradScaler")
    keys = set(found)
    if "format" in keys or "schema" in keys:
        return _ours(found)
    if keys & _TORCH:
        return _of_scalers([_torch(found, "")])
    if any(str(key).startswith("loss_scaler") for key in keys):
        return _of_scalers(_apex(found))
    listed = ", ".join(sorted(map(shown, keys))[:6])
    raise _Misfit(f"no known format has the keys {listed}. What can be read is the state of {_KINDS}")


def _of_scalers(scalers: list[Any]) -> SessionState:
    return {
        "format": "xamp",
        "schema": SCHEMA,
        "level": "",
        "dtype": "",
        "steps": {},
        "scalers": scalers,
        "optimizers": [],
        "masters": [],
    }


def _ours(state: Mapping[str, Any]) -> SessionState:
    schema = state.get("schema")
    if state.get("format") != "xamp" or not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise _Misfit(f"not a state of xamp: format={shown(state.get('format'))}, schema={shown(schema)}")
    if schema > SCHEMA:
        raise _Misfit(
            f"'schema' is {schema}, from a newer xamp; this one reads up to {SCHEMA}. Upgrade xamp, or save with this "
            "one"
        )
    scaler = partial(_fields, dynamic=_flag, scale=_scale, growth_tracker=_count)
    optimizer = partial(_fields, overflow_run=_count, masters=_masters)
    optional: Any = {"fp8": _word} if "fp8" in state else {}
    found: Any = _fields(
        *(state, ""),
        format=_word,
        schema=_count,
        level=_word,
        dtype=_word,
        steps=partial(_fields, applied=_count, skipped=_count),
        scalers=partial(_list, read=scaler),
        optimizers=partial(_list, read=optimizer),
        masters=partial(_list, read=_masters),
        **optional,
    )
    return found  # type: ignore[no-any-return]


def _torch(value: object, key: str) -> ReadScaler:
    state = _mapping(value, key)
    found = _fields(
        *(state, key, True),  # torch reads five keys; a subclass may have more
        scale=_scale,
        growth_factor=_scale,
        backoff_factor=_scale,
        growth_interval=partial(_count, below=2**63),
        _growth_tracker=_count,
    )
    return {
        "dynamic": _flag(state.get("dynamic", True), f"{key}['dynamic']"),
        "scale": found["scale"],
        "growth_tracker": found["_growth_tracker"],
        "factors": (found["growth_factor"], found["backoff_factor"], found["growth_interval"]),
    }


def _apex(state: Mapping[str, Any]) -> list[SavedScaler]:
    scaler = partial(_fields, loss_scale=_scale, unskipped=_count)
    names = [f"loss_scaler{i}" for i in range(len(state))]  # in order of the numbers, not of the keys in the file
    found = _fields(state, "", **dict.fromkeys(names, scaler)).values()
    return [{"dynamic": None, "scale": one["loss_scale"], "growth_tracker": one["unskipped"]} for one in found]


# ---------------------------------------------------------------- single values


def _fields(value: object, key: str, others: bool = False, /, **wanted: _Read) -> dict[str, Any]:
    """Read a dict that has the keys of ``wanted``, each by its function; ``others``: it may have more."""
    found = _mapping(value, key)
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(map(str, found.keys() - wanted.keys()))
    if missing:
        raise _Misfit(f"the key {missing[0]!r} is missing", key)
    if unknown and not others:
        raise _Misfit(f"unknown key {unknown[0]!r}", key)
    return {name: read(found[name], f"{key}[{name!r}]") for name, read in wanted.items()}


def _mapping(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        what = f"must be a dict, and is {type(value).__name__}. What can be read is the state of {_KINDS}"
        raise _Misfit(what, key or " itself")
    return value


def _list(value: object, key: str, read: _Read) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _Misfit(f"must be a list, and is {type(value).__name__}", key)
    return [read(each, f"{key}[{i}]") for i, each in enumerate(value)]


def _word(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise _Misfit(f"must be a string, and is {type(value).__name__}", key)
    return value


def _scale(value: object, key: str) -> float:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not 2.0**-149 <= number <= LARGEST_SCALE:  # fp32's range with subnormals, which a collapsed run may leave
        raise _Misfit(f"must be a finite number above 0 that fp32 can hold, and is {_shown(value)}", key)
    return float(number)


def _count(value: object, key: str, below: int = 2**31) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise _Misfit(f"must be a whole number from 0 to 2**{below.bit_length() - 1} - 1, and is {_shown(value)}", key)
    return value


def _flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise _Misfit(f"must be True or False, and is {shown(value)}", key)
    return value


def _masters(value: object, key: str) -> Mapping[str, torch.Tensor]:
    found = _mapping(value, key)
    for name, tensor in found.items():
        inner = f"{key}[{shown(name)}]"
        if not isinstance(name, str):
            raise _Misfit("a name must be a string", inner)
        if problem := _unfit(tensor):
            raise _Misfit(f"must be a dense fp32 tensor, and is {problem}", inner)
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
