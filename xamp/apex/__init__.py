"""The parts of NVIDIA's Apex that training scripts used, without Apex: ``from xamp.apex import amp``.

``_frontend`` is ``amp.initialize``, on ``_properties`` and ``_amp_state``; ``_start`` starts the ``_engine``, whose
steps follow Apex's rules; ``_scale_loss`` and ``_scaler`` are ``amp.scale_loss`` and its state; ``_several`` is a loss
over several calls of ``initialize``. ``_install`` answers ``import apex``; ``_patches`` puts ``_wrappers`` in place of
the functions in ``_lists``; ``_casts`` and ``_rules`` say how a call is cast; ``_handle`` (on ``_casts_handle`` and
``_legacy``) is ``amp.init``, ``_functions`` what users register; ``_regions`` is op policy ``"apex"``. ``_delegate``
hands over to a real Apex, which ``_real`` finds. The rest is in folders of Apex's names; ``_modules`` lists them and
what is left out. ``amp_C`` is ``_multi_tensor``, ``_multi_tensor_steps`` and ``_multi_tensor_lamb`` on ``updates``; the
optimizers call it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xamp.apex._install import install, tell_left_out, uninstall
from xamp.apex._modules import LEFT_OUT

if TYPE_CHECKING:
    from xamp.apex import amp, contrib, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = [
    "amp",
    "contrib",
    "fp16_utils",
    "install",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall",
]

_MORE = ("amp_C", "apex_C", "fused_dense", "mlp", "pyprof")

tell_left_out()


def __getattr__(name: str) -> Any:
    if name in __all__ or name in _MORE or f"apex.{name}" in LEFT_OUT:
        from xamp.registry.registry import require_torch

        require_torch(f"xamp.apex.{name}")  # raises an error that says what to install, instead of an ImportError
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
