"""Names in pickles of xamp 0.1.0; see :mod:`xamp.pickled`."""

from __future__ import annotations

from xamp.scaling.model_states import load_masters as _load_masters
from xamp.scaling.model_states import save_masters as _save_masters

__all__ = ["_load_masters", "_save_masters"]
