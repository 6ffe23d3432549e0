"""The names that pickles of managed models contain. These names stay, so that a pickle outlives every move of the code.

Pickles of version 0.1.0 name ``xamp._forward``, ``xamp._containers`` and ``xamp._masters``. Those modules stand in the
folder ``from_0_1`` and hold nothing but these names.
"""

from __future__ import annotations

from xamp.casting.forward import make_instance_method as instance_method
from xamp.casting.forward import rebuild
from xamp.casting.region import make_region as region
from xamp.ground.containers import cast_any, cast_floats
from xamp.scaling.ddp import note_forward
from xamp.scaling.model_states import load_masters, save_masters

__all__ = [
    "cast_any",
    "cast_floats",
    "instance_method",
    "load_masters",
    "note_forward",
    "rebuild",
    "region",
    "save_masters",
]
