"""The module that :func:`xamp.testing.run.run` makes pytest collect: it holds one class for each lane during a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from xamp.testing import Conformance
from xamp.testing.lane import Lane

__all__ = ["on"]


@contextlib.contextmanager
def on(lanes: Sequence[Lane], ledger: str = "") -> Iterator[None]:
    """Put one class for each of ``lanes`` into this module while the context is open."""
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
