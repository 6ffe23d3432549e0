"""``from xamp.apex import amp`` replaces ``from apex import amp`` on any device, with Apex's names and Apex's rules."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

from xamp.apex._amp_state import _amp_state, master_params
from xamp.apex._casts_handle import disable_casts
from xamp.apex._frontend import initialize
from xamp.apex._functions import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from xamp.apex._handle import init
from xamp.apex._scale_loss import load_state_dict, scale_loss, state_dict

__all__ = [
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
