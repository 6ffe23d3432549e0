"""What :func:`xamp.testing.run.run` makes pytest collect: while it runs, one class a lane stands here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from xamp.testing import Conformance
from xamp.testing.lane import Lane

__all__ = ["on"]


@contextlib.contextmanager
def on(lanes: Sequence[Lane], ledger: str = "") -> Iterator[None]:
    """Let the classes of ``lanes`` stand in this module."""
    names = [f"Test_{index}_" + re.sub(r"\W", "_", f"{lane}_{lane.device}") for index, lane in enumerate(lanes)]
    for name, lane in zip(names, lanes, strict=True):
        told = {"backend": str(lane), "device": str(lane.device), "require": tuple(sorted(lane.required))}
        about = {"__module__": __name__, "ledger": ledger, "title": lane.title}
        globals()[name] = type(name, (Conformance,), {**told, **about})
    try:
        yield
    finally:
        for name in names:
            del globals()[name]
