"""``apex.amp._amp_state`` as a module: scripts write ``from apex.amp._amp_state import _amp_state``."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

from xamp.apex._scale_loss import master_params
from xamp.apex._state import state as _amp_state

__all__ = ["_amp_state", "master_params"]
