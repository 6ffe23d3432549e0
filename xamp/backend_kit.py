"""Helper functions for writing a backend: they check a device, and put errors and settings into words.

This module is public, for backends of third parties as for those that ship with xamp. It needs torch. The interface
itself is :mod:`xamp.contract`.
"""

from __future__ import annotations

from xamp.contract import masked
from xamp.registry.causes import first_line, first_sentence, one_line
from xamp.registry.findings import environment_settings
from xamp.registry.fused_classes import is_right as fused_is_right
from xamp.registry.fused_classes import right_classes as fused_forms
from xamp.registry.trials import defect_of, fp8_recipes

__all__ = [
    "defect_of",
    "environment_settings",
    "first_line",
    "first_sentence",
    "fp8_recipes",
    "fused_forms",
    "fused_is_right",
    "masked",
    "one_line",
]
