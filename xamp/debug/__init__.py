"""Where precision is lost: the first inf or nan, a model at a level against fp32, and traces of two runs compared.

Nothing of this runs, or is imported, until it is called for.
"""

from __future__ import annotations

from xamp.debug.finding import Finding
from xamp.debug.nonfinite import NonFinite, find_nonfinite
from xamp.debug.ranges import Range

__all__ = ["Finding", "NonFinite", "Range", "find_nonfinite"]
