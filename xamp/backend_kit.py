"""What the class of a backend may use besides :mod:`xamp.contract`: trying the device, and saying what was found.

Public, for backends of third parties as for those that ship with xamp. Needs torch.
"""

from __future__ import annotations

from xamp.contract import masked
from xamp.registry.causes import first_line, one_line
from xamp.registry.device_trial import defect_of
from xamp.registry.findings import environment_settings
from xamp.scaling.fused import is_right as fused_is_right

__all__ = ["defect_of", "environment_settings", "first_line", "fused_is_right", "masked", "one_line"]
