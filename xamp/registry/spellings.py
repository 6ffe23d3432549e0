"""Names that ``backend=`` and ``XAMP_BACKEND`` accept although no backend is registered under them."""

from __future__ import annotations

__all__ = ["RESERVED", "SPELLINGS"]

SPELLINGS = {"apex": "apex"}
"""Name -> the op policy that it stands for. The backend is that of the model's device, shown under this name."""

RESERVED = frozenset({"auto", *SPELLINGS})
"""Names that a spec must not have, in lower case."""
