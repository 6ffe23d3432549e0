"""Apex's optimization levels and their overrides: names, defaults, contradictions and the messages for them.

The names and messages are Apex's interface: scripts print, parse and catch them. Levels O4 and O5, and
``patch_torch_functions_type``, are those of ROCm's Apex.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from xamp.apex._amp_state import _amp_state as state
from xamp.policy import LARGEST_SCALE, SMALLEST_SCALE
from xamp.values.log import say

if TYPE_CHECKING:
    import torch

__all__ = ["LEVELS", "OVERRIDES", "OptLevel", "Properties", "tell", "warn_or_err"]


@dataclasses.dataclass(frozen=True)
class OptLevel:
    """One optimization level.

    Attributes:
        brief: the line that ``initialize`` logs for the level.
        defaults: its properties; dtypes are given by name.
        own_type: the name of the dtype that patched functions lower to; None where the level patches none.
    """

    brief: str
    defaults: dict[str, Any]
    own_type: str | None = None


def _defaults(cast: str | None, patch: bool, keep_bn: bool | None, masters: bool | None, scale: str | float) -> Any:
    return {
        "enabled": True,
        "cast_model_type": cast,
        "patch_torch_functions": patch,
        "keep_batchnorm_fp32": keep_bn,
        "master_weights": masters,
        "loss_scale": scale,
    }


LEVELS = {
    "O0": OptLevel("O0:  Pure FP32 training.\n", _defaults("float32", False, None, False, 1.0)),
    "O1": OptLevel(
        "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        _defaults(None, True, None, None, "dynamic"),
        "float16",
    ),
    "O2": OptLevel(
        "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
        _defaults("float16", False, True, True, "dynamic"),
    ),
    "O3": OptLevel("O3:  Pure FP16 training.", _defaults("float16", False, False, False, 1.0)),
    "O4": OptLevel(
        "O4:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        _defaults(None, True, None, None, 1.0),
        "bfloat16",
    ),
    "O5": OptLevel(
        "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n",
        _defaults("bfloat16", False, True, True, 1.0),
    ),
}
OVERRIDES = (
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
"""The properties that ``initialize`` takes besides the level, in the order in which it applies them."""


def tell(message: str) -> None:
    """Log ``message``, unless ``verbosity`` is 0."""
    if state.verbosity > 0:
        say("%s", message)


def warn_or_err(message: str) -> None:
    if not state.hard_override:
        raise RuntimeError(message)
    say("Warning:  %s", message)


class Properties:
    """The settings in force. Each is an attribute; setting one checks it against the level.

    Attributes:
        options: all settings by name.

    Raises:
        RuntimeError: the new value contradicts the level.
        AssertionError: ``keep_batchnorm_fp32`` is neither a boolean, the name of one, nor None.
        ValueError: ``loss_scale`` is no number, or a number that fp32 cannot hold.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        rule = _RULES.get(name)
        self.options[name] = value if rule is None else rule(self.opt_level, value)

    def take(self, level: str) -> None:
        """Make the defaults of ``level`` the settings."""
        import torch

        self.options["opt_level"] = level
        for name, value in LEVELS[level].defaults.items():
            named = name == "cast_model_type" and value is not None
            self.options[name] = getattr(torch, value) if named else value

    @property
    def patch_type(self) -> torch.dtype:
        """The dtype that patched functions lower to."""
        import torch

        asked = self.options.get("patch_torch_functions_type")
        name = LEVELS[self.opt_level].own_type or "float16"
        return asked or getattr(torch, name)  # type: ignore[no-any-return]

    def lines(self) -> list[str]:
        """One line for each setting, as ``initialize`` logs them."""
        return [f"{name!s:22} : {value}" for name, value in self.options.items()]


def _cast_model_type(level: str | None, value: Any) -> Any:
    import torch

    if level in ("O1", "O4") and value not in (None, False, torch.float32):
        warn_or_err(
            f"{level} inserts casts around Torch functions rather than model weights, so with {level}, the model "
            "weights themselves should remain FP32. If you wish to cast the model to a different type, use "
            f"opt_level='O2' or 'O3'. cast_model_type was {value}"
        )
    return value


def _patch_torch_functions(level: str | None, value: Any) -> Any:
    if value and level not in ("O1", "O4"):
        warn_or_err("Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'.")
    return value


def _patch_torch_functions_type(level: str | None, value: Any) -> Any:
    import torch

    own = LEVELS[level].own_type if level else None
    if value is not None and (own is None or value is not getattr(torch, own)):
        warn_or_err(
            "Currently, patch_torch_functions_type should only be set by selecting opt_level='O1' (torch.float16) or "
            f"'O4' (torch.bfloat16). patch_torch_functions_type was {value}"
        )
    return value


def _keep_batchnorm_fp32(level: str | None, value: Any) -> Any:
    if level in ("O1", "O4") and value is not None:
        warn_or_err(
            f"With opt_level {level}, batchnorm functions are automatically patched to run in FP32, so "
            f"keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {value}"
        )
    value = {"False": False, "True": True}.get(value, value) if isinstance(value, str) else value
    if not (value is True or value is False or value is None):
        raise AssertionError(
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
            f"keep_batchnorm_fp32={value}"
        )
    return value


def _master_weights(level: str | None, value: Any) -> Any:
    if level in ("O1", "O4") and value is not None:
        warn_or_err(
            f"It doesn't make sense to use master_weights with {level}. With {level}, your model weights themselves "
            "should be FP32."
        )
    return value


def _loss_scale(_: str | None, value: Any) -> Any:
    if value == "dynamic":
        return value
    scale = float(value)
    if not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:  # nan compares as False
        raise ValueError(
            f"amp.initialize: loss_scale={value!r} would make every weight nan or inf: give 'dynamic' or a number from "
            f"{SMALLEST_SCALE:g} to {LARGEST_SCALE:g}."
        )
    return scale


_RULES = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "patch_torch_functions_type": _patch_torch_functions_type,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}
