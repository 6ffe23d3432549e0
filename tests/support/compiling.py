"""Starts torch's compiler anew, and saves a quarter of its time: what it does for logs that no test reads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


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


@contextlib.contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Let inductor keep its files in ``folder``.

    torch 2.7 remembers the path of a header there, which it must forget before and after: code that a later test
    compiles, and that is kept for later processes, would include it.
    """
    from torch._inductor import codecache

    forget = getattr(getattr(codecache, "cpp_prefix_path", None), "cache_clear", lambda: None)
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Let the compiler forget all graphs. What torch itself warns of meanwhile, on some Python, is no test's error."""
    import torch._dynamo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
