"""Parses single arguments of ``initialize``, in the spellings that people and argparse use.

Each function takes the given value, and also the argument's name if several arguments share the function. It raises a
PolicyError that repeats the call and lists the valid values. This module imports no torch at module level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from xamp.errors import PolicyError
from xamp.values.shown import shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "boolean",
    "cast_inputs",
    "choice",
    "dtype",
    "fused",
    "keep",
    "methods",
    "number",
    "number_between",
    "output_dtype",
]

_DTYPE_ALIASES = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}


def number(name: str, value: object, *, call: str = "initialize") -> float:
    """Return a real number, also from a string; a bool is not accepted."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except Exception:  # an object of somebody else's class raises what it likes
        found = math.nan
    if math.isnan(found):
        raise PolicyError(f"{call}({name}={shown(value)}): must be a number.")
    return found


def number_or_tensor(name: str, value: Any, *, call: str = "clip_grad_norm_") -> Any:
    """Return a number as it is, also a tensor; of anything else the number that it spells."""
    import torch

    return value if isinstance(value, float | int | torch.Tensor) else number(name, value, call=call)


def number_between(
    name: str, value: object, low: float, high: float, *, whole: bool = False, call: str = "initialize"
) -> float:
    """Return a number above ``low`` and below ``high``; if ``whole``, it must be a whole number and is an int."""
    found = number(name, value, call=call)
    if not low < found < high or (whole and found != int(found)):
        kind = "a whole number" if whole else "a number"
        bound = f"above {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        raise PolicyError(f"{call}({name}={shown(value)}): must be {kind} {bound}.")
    return int(found) if whole else found


def boolean(name: str, value: object, *, call: str = "initialize") -> bool | None:
    """Return True, False, or None, which stands for the level's own value."""
    found = _parse_boolean(value)
    if found is None or isinstance(found, bool):
        return found
    choices = "True, False, 'True', 'False', or None for the level's own" if call == "initialize" else "True or False"
    raise PolicyError(f"{call}({name}={shown(value)}): must be {choices}.")


def _parse_boolean(value: object) -> object:
    """Return the boolean that a string spells; return any other value unchanged."""
    return {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return one of ``choices``; the spelling must be exact."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise PolicyError(f"initialize({name}={shown(value)}): no such choice. Choices: {listed}.")
    return str(value)  # of str itself, also for a subclass


def fused(value: object) -> str | bool:
    """Return ``"auto"``, ``"one-pass"``, True or False."""
    found = _parse_boolean(value)
    if isinstance(found, bool) or (isinstance(found, str) and found in ("auto", "one-pass")):
        return found
    raise PolicyError(f"initialize(fused={shown(value)}): no such choice. Choices: 'auto', 'one-pass', True, False.")


def dtype(name: str, value: object) -> torch.dtype:
    """Return one of the three dtypes of mixed precision: float16, bfloat16 or float32."""
    import torch

    if isinstance(value, torch.dtype):
        spelling = str(value).removeprefix("torch.")
    else:
        spelling = value.strip().lower().removeprefix("torch.") if isinstance(value, str) else ""
    canonical = _DTYPE_ALIASES.get(spelling)
    if canonical is None:
        raise PolicyError(
            f"initialize({name}={shown(value)}): not a dtype that mixed precision works in. Choices: torch.float16, "
            f"torch.bfloat16, torch.float32, or a name: {', '.join(_DTYPE_ALIASES)}."
        )
    return getattr(torch, canonical)  # type: ignore[no-any-return]


def output_dtype(value: object) -> torch.dtype | None:
    """Return the dtype of ``cast_model_outputs``: fp32 for None and True, None for False."""
    import torch

    found = _parse_boolean(value)
    if found is None or found is True:
        return torch.float32
    return None if found is False else dtype("cast_model_outputs", value)


def cast_inputs(value: object) -> tuple[bool, tuple[type | str, ...]]:
    """Return whether ``cast_model_inputs`` casts arguments, and the names and types that it exempts."""
    found = _parse_boolean(value)
    if isinstance(found, bool):
        return found, ()
    items = (found,) if isinstance(found, (str, type)) else _items("cast_model_inputs", found)
    for item in items:
        if not isinstance(item, type) and not (isinstance(item, str) and item.isidentifier()):
            raise PolicyError(
                f"initialize(cast_model_inputs={shown(value)}): {shown(item)} is neither the name of an argument of "
                "forward nor a type. Give True, False, or what is not to be cast, such as ('boxes', MyBatch)."
            )
    return True, tuple(dict.fromkeys(items))


def keep(name: str, value: object) -> tuple[type | str, ...]:
    """Return module classes, qualified names and glob patterns; a single one need not be in a list."""
    from torch import nn

    items: Iterable[object] = (value,) if isinstance(value, (str, type)) else _items(name, value)
    kept: list[type | str] = []
    for item in items:
        if not ((isinstance(item, type) and issubclass(item, nn.Module)) or (isinstance(item, str) and item)):
            raise PolicyError(
                f"initialize({name}={shown(value)}): {shown(item)} is neither a module class, nor a qualified name "
                "such as 'encoder.norm', nor a glob pattern such as '*.norm'."
            )
        kept.append(item)
    return tuple(kept)


def methods(value: object) -> tuple[str, ...]:
    """Return the names of methods without duplicates; ``forward`` is always the first."""
    names = (value,) if isinstance(value, str) else tuple(_items("methods", value))
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise PolicyError(
                f"initialize(methods={shown(value)}): {shown(name)} is no method name. Names look like "
                "('forward', 'generate')."
            )
    return tuple(dict.fromkeys(("forward", *names)))


def _items(name: str, value: object) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (bytes, dict, Iterator)):  # it is read more than once
        raise PolicyError(f"initialize({name}={shown(value)}): must be a list or tuple.")
    try:
        return list(value)
    except Exception as error:
        raise PolicyError(
            f"initialize({name}={shown(value)}): must be a list or tuple, and cannot be read as one: "
            f"{type(error).__name__}."
        ) from error
