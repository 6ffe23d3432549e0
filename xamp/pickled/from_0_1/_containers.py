"""Names in pickles of xamp 0.1.0; see :mod:`xamp.pickled`."""

from __future__ import annotations

from xamp.ground.containers import cast_any, cast_floats

__all__ = ["cast_any", "cast_floats"]
