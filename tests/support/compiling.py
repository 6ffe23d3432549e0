"""The compiler without what it does for logs that no test reads: a quarter of its time."""

from __future__ import annotations

import logging
import os
import sys


def log_less() -> None:
    """Compile from now on without torch's structured trace, unless it is asked for, and without timing guards.

    The latter where torch's compiler is imported already, so that it is called again later.

    pytest hands its handlers to each logger that does not propagate, and where this one has a handler torch composes
    all of its trace. To time guards torch empties the processor's caches: 32 ms for each graph.
    """
    if "TORCH_TRACE" not in os.environ:
        trace = logging.getLogger("torch.__trace")
        trace.propagate = True
        for handler in [*trace.handlers]:
            trace.removeHandler(handler)
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
