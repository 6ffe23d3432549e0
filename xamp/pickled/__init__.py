"""The names that pickles of managed models, and of what a session tells of its steps, contain.

These stay, so that a pickle outlives every move of the code.
"""

from __future__ import annotations

from xamp.averages import Average
from xamp.casting.forward import make_instance_method as instance_method
from xamp.casting.forward import rebuild
from xamp.casting.region import make_region as region
from xamp.distributed.ddp import note_forward
from xamp.ground.containers import cast_any, cast_floats
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.masters import load_masters, save_masters

__all__ = [
    "Average",
    "Stats",
    "StepOutcome",
    "cast_any",
    "cast_floats",
    "instance_method",
    "load_masters",
    "note_forward",
    "rebuild",
    "region",
    "save_masters",
]
