"""Mixed precision in one call, the same on NVIDIA and AMD GPUs, Ascend NPUs and CPUs.

::

    model, optimizer = xamp.initialize(model, optimizer, level="O1")
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

``import xamp`` imports no torch and no backend and changes nothing. Each name is imported from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xamp import accel, apex, debug
    from xamp.averages import ema
    from xamp.casting.autocast import autocast
    from xamp.casting.custom_function import custom_bwd, custom_fwd
    from xamp.casting.exact_fp32 import exact_fp32
    from xamp.casting.functions import disable_casts, float_function, half_function, promote_function
    from xamp.casting.registered import register_float_function, register_half_function, register_promote_function
    from xamp.debug.recorder import trace
    from xamp.errors import (
        BackendUnavailable,
        CheckpointError,
        LossScaleCollapsed,
        PolicyError,
        StateError,
        UnsupportedPolicy,
        XampError,
    )
    from xamp.registry.device_in_use import device, device_type, distributed_backend, is_available
    from xamp.registry.registry import available_backends, register_backend
    from xamp.sessions.clipping import clip_grad_norm_, clip_grad_value_, master_of, master_params
    from xamp.sessions.grad_scaler import GradScaler
    from xamp.sessions.initialize import initialize
    from xamp.sessions.scale_loss import loss_scale, scale_loss
    from xamp.sessions.session import StepOutcome, load_state_dict, session, state_dict
    from xamp.sessions.sharding import fsdp_policy
    from xamp.values.version import __version__

_HOMES = {
    "accel": ("accel",),
    "apex": ("apex",),
    "casting.autocast": ("autocast",),
    "casting.custom_function": ("custom_bwd", "custom_fwd"),
    "registry.device_in_use": ("device", "device_type", "distributed_backend", "is_available"),
    "debug": ("debug",),
    "debug.recorder": ("trace",),
    "casting.exact_fp32": ("exact_fp32",),
    "casting.functions": ("disable_casts", "float_function", "half_function", "promote_function"),
    "averages": ("ema",),
    "sessions.clipping": ("clip_grad_norm_", "clip_grad_value_", "master_of", "master_params"),
    "sessions.grad_scaler": ("GradScaler",),
    "sessions.initialize": ("initialize",),
    "casting.registered": ("register_float_function", "register_half_function", "register_promote_function"),
    "registry.registry": ("available_backends", "register_backend"),
    "sessions.sharding": ("fsdp_policy",),
    "sessions.scale_loss": ("loss_scale", "scale_loss"),
    "sessions.session": ("StepOutcome", "load_state_dict", "session", "state_dict"),
    "errors": (
        "BackendUnavailable",
        "CheckpointError",
        "LossScaleCollapsed",
        "PolicyError",
        "StateError",
        "UnsupportedPolicy",
        "XampError",
    ),
}
_MODULES = ("accel", "apex", "debug")  # names that stand for the module itself
_WITHOUT_TORCH = ("apex", "registry.registry", "errors")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "GradScaler",
    "LossScaleCollapsed",
    "PolicyError",
    "StateError",
    "StepOutcome",
    "UnsupportedPolicy",
    "XampError",
    "__version__",
    "accel",
    "apex",
    "autocast",
    "available_backends",
    "clip_grad_norm_",
    "clip_grad_value_",
    "custom_bwd",
    "custom_fwd",
    "debug",
    "device",
    "device_type",
    "disable_casts",
    "distributed_backend",
    "ema",
    "exact_fp32",
    "float_function",
    "fsdp_policy",
    "half_function",
    "initialize",
    "is_available",
    "load_state_dict",
    "loss_scale",
    "master_of",
    "master_params",
    "promote_function",
    "register_backend",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "session",
    "state_dict",
    "trace",
]


if not TYPE_CHECKING:  # with it, mypy and pyright would take each misspelt name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("xamp.values.version").__version__
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'xamp' has no attribute {name!r}")
        if home not in _WITHOUT_TORCH:
            from xamp.registry.registry import require_torch

            require_torch(f"xamp.{name}")  # raises an error that says what to install, instead of an ImportError
        module = importlib.import_module(f"xamp.{home}")
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
