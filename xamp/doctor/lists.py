"""Compares the autocast lists of the installed torch with the op table, written from those of other releases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xamp.casting.ops.parts import exists
from xamp.casting.ops.table import LAYERS, OWN, REFERENCE, RULES
from xamp.op_dtypes.survey import own_list
from xamp.registry.findings import NOTE, Finding
from xamp.registry.registry import HOST

__all__ = ["list_findings"]

_EXPECTED = {
    REFERENCE: (RULES.keys() - LAYERS, "under the portable policy xamp casts them"),
    HOST: (OWN[HOST], "they run in the dtype of what they are given"),
}


def list_findings() -> Iterator[Finding]:
    """What torch's lists for CUDA and for CPUs have that the table does not know, and what they lack."""
    for device_type, (expected, then) in _EXPECTED.items():
        listed = own_list(device_type, {})
        where = f"torch {torch.__version__}: its autocast list for {device_type}"
        unknown = listed - RULES.keys() - OWN[device_type]
        if unknown:
            text = f"{where} has overloads that xamp does not know, and leaves to that list: {_told(unknown)}"
            yield Finding(NOTE, text, "a newer xamp may know them; `xamp policy show` says what becomes of the others")
        missing = {overload for overload in expected - listed if exists(overload)}
        if missing:
            yield Finding(NOTE, f"{where} lacks overloads that other releases list: {_told(missing)}; {then}")


def _told(overloads: set[str]) -> str:
    return ", ".join(sorted(overloads))
