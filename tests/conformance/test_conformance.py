"""The conformance suite itself, on every usable device: one class each, as a third party writes it.

Covers: xamp.testing.conformance, xamp.testing.lane.
"""

from __future__ import annotations

from lanes import usable_lanes

from xamp.testing import Conformance

for _lane in usable_lanes():
    _name = f"Test{_lane.kind.capitalize()}"
    globals()[_name] = type(_name, (Conformance,), {"backend": str(_lane), "__module__": __name__})
