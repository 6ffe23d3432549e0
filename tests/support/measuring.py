"""Whose coverage is measured, of the processes that tests start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_VARIABLES = "COVERAGE_"  # how they begin, by which a process is told to measure


def told() -> dict[str, str]:
    """The variables by which a child of this process measures its coverage; none where this one does not."""
    return {name: value for name, value in os.environ.copy().items() if name.startswith(_VARIABLES)}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that does not measure."""
    return {name: value for name, value in environment.items() if not name.startswith(_VARIABLES)}


def stop() -> None:
    """Measure no more in this process, nor in those it starts."""
    for name in told():
        del os.environ[name]
    stop_here()


def stop_here() -> None:
    """Stop every coverage that runs in this process. Processes that it starts may still measure theirs.

    Several may run, of which only the latest records: when it stops, the one before records again.
    """
    if "coverage" in sys.modules:
        while (measuring := sys.modules["coverage"].Coverage.current()) is not None:
            measuring.stop()
