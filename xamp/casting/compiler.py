"""What torch.compile must leave alone, said without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["keep_eager"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def keep_eager(function: _Function, *, inner: bool = True) -> _Function:
    """Have the compiler leave the frames of ``function`` alone, and those of what it calls if ``inner``.

    Where the compiler gives up on a function that it was to compile, that runs as it is, and each function that it
    calls is taken for one to compile. What sets the thread's state, or asks for it, would then do so while it is being
    traced, and not when it runs. Being traced as a part of another function is another matter, and stays possible.
    """
    frames: Any = torch._C._dynamo.eval_frame
    code = function.__code__
    if hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip if inner else default))
    elif hasattr(frames, "skip_code"):  # torch before 2.7
        frames.skip_code(code)
    return function
