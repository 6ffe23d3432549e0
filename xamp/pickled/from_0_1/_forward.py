"""Names in pickles of xamp 0.1.0; see :mod:`xamp.pickled`."""

from __future__ import annotations

from xamp.casting.forward import InstanceMethod as _InstanceMethod
from xamp.casting.forward import rebuild as _rebuild
from xamp.casting.region import Region

__all__ = ["Region", "_InstanceMethod", "_rebuild"]
