"""The compiler without what it does for logs that no test reads: a quarter of its time."""

from __future__ import annotations

import logging
import sys


def log_less() -> None:
    """Compile from now on without torch's structured trace, and without timing the guards of each graph.

    pytest hands its handlers to each logger that does not propagate, and where this one has a handler torch composes
    all of its trace. To time guards torch empties the processor's caches: 32 ms for each graph.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    for handler in [*trace.handlers]:
        trace.removeHandler(handler)
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
