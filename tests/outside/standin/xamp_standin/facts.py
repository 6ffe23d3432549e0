"""What is known of a device: a file of facts, as ``python -m xamp.testing.facts`` writes it on that device."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["VARIABLE", "Facts", "facts"]

VARIABLE = "XAMP_STANDIN_FACTS"
"""Names another file than that of the package: one of facts, or a result of ``ci/gpu.sh``, which has some."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """One device's gaps and manners.

    Attributes:
        about: what it was recorded on.
        cards: how many of them there were. Of the stand-in there is one: torch's guard for devices that are written in
            Python knows no other index.
        dtypes: names of the lower dtypes that it computes in.
        refuses: by operator and dtype, the text of the NotImplementedError.
        fp32_numbers: fused steps that take their numbers, such as Adam's betas, in fp32.
        fused: by name of torch's optimizer, the error of its fused implementation; empty where it has one.
        capturable: the same of its capturable form.
        autocast: by what its autocast does, the operators to which it is done; as :data:`xamp_abacus.autocast.LISTS`.
        recurrent: the dtype to which autocast casts recurrent layers, whatever its own; empty: its own.
        copies: ``late_by`` is the number of operators after which a copy to pinned memory has arrived; 0: at once.
        waits: operators at which the host waits for the device, besides copies.
        fork: the error of who uses the device in a forked process after its parent did; empty: it works.
    """

    about: Mapping[str, str]
    cards: int
    dtypes: Sequence[str]
    refuses: Mapping[str, Mapping[str, str]]
    fp32_numbers: Sequence[str]
    fused: Mapping[str, str]
    capturable: Mapping[str, str]
    autocast: Mapping[str, str]
    recurrent: str
    copies: Mapping[str, int]
    waits: Sequence[str]
    fork: str


@functools.cache
def facts() -> Facts:
    """Those of the file in use.

    Raises:
        TypeError: the file lacks a key, or has one too many.
    """
    path = os.environ.get(VARIABLE) or Path(__file__).with_name("facts") / "h100.json"
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return Facts(**found.get("facts", found))
