"""What is noted of a DDP at a forward, and the compiler.

Covers: xamp.distributed.ddp, xamp.torch_compat.compiler.
"""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from xamp.distributed import ddp
from xamp.torch_compat.compiler import keep_eager


def frames_looked_at(name: str) -> int:
    """How many frames the compiler looks at where code that it skips, as that of a framed forward, calls a function."""

    def frame(x: torch.Tensor) -> torch.Tensor:
        getattr(ddp, name)()
        return x

    keep_eager(frame, inner=False)
    torch.compiler.reset()
    counters.clear()
    torch.compile(frame, backend="eager")(torch.ones(1))
    return int(counters["frames"]["total"])


def test_the_compiler_does_not_look_at_the_function_that_notes_a_ddp() -> None:
    """It would read the DDP that runs and whether gradients are enabled while it traces, and not at each forward."""
    assert frames_looked_at("note_wrapper") == 0
    assert frames_looked_at("active_ddp") == 1  # a function that it may look at
