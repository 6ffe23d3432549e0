"""Where precision is lost: the first inf or nan, a model at a level against fp32, and traces of two runs compared.

Nothing of this runs, or is imported, until it is called for.
"""

from __future__ import annotations

from xamp.debug.compare import Comparison, Parting, compare
from xamp.debug.finding import Finding
from xamp.debug.measured import Row
from xamp.debug.nonfinite import NonFinite, find_nonfinite
from xamp.debug.profile import profile
from xamp.debug.profile_result import Advice, Profile
from xamp.debug.ranges import Range
from xamp.debug.trace_file import Run, read

__all__ = [
    "Advice",
    "Comparison",
    "Finding",
    "NonFinite",
    "Parting",
    "Profile",
    "Range",
    "Row",
    "Run",
    "compare",
    "find_nonfinite",
    "profile",
    "read",
]
