"""Names that ``backend=`` and ``XAMP_BACKEND`` take and that name no device of their own."""

from __future__ import annotations

__all__ = ["RESERVED", "SPELLINGS"]

SPELLINGS = {"apex": "apex"}
"""Name -> the op policy that it means. The backend is the one of the model's device, under this name."""

RESERVED = frozenset({"auto", *SPELLINGS})
"""Names that no spec may have, in lower case."""
