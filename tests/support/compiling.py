"""Starts torch's compiler anew, and saves a quarter of its time: what it does for logs that no test reads."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def log_less() -> None:
    """Turn off torch's structured trace, and the timing of guards if the compiler is imported already.

    pytest adds its handlers to each logger that does not propagate. Where the logger of the trace has a handler, torch
    composes the whole trace. To time the guards of a graph it empties the processor's caches, which takes 32 ms.
    """
    if "TORCH_TRACE" not in os.environ:  # by which one asks for the trace
        trace = logging.getLogger("torch.__trace")
        trace.propagate = True
        for handler in [*trace.handlers]:
            trace.removeHandler(handler)
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


def forget() -> None:
    """Let the compiler forget all graphs. What torch itself warns of meanwhile, on some Python, is no test's error."""
    import torch._dynamo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
