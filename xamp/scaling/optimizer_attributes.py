"""The attributes that a step sets on the optimizer itself, also in compiled code.

Where the compiler ends in an error of its own when it meets such an assignment, the graph breaks there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xamp.ground.compiler import break_graphs
from xamp.ground.torch_features import traces_attributes_of_optimizers

__all__ = ["lend_flag", "note_call", "take_flag_back"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _writes(function: _Function) -> _Function:
    if traces_attributes_of_optimizers():
        return function
    return break_graphs("the compiler of this torch does not trace what sets attributes of an optimizer")(function)


@_writes
def note_call(optimizer: Any) -> None:
    """Let a scheduler see that ``optimizer.step`` was called: it warns of a wrong order elsewhere."""
    optimizer._opt_called = True


@_writes
def lend_flag(optimizer: Any, found_inf: torch.Tensor) -> None:
    """Give the optimizer, for one step, the flag by which its fused form skips.

    Args:
        optimizer: the optimizer. A ``grad_scale`` of the user's own counts for this step.
        found_inf: fp32 scalar on its device: above 0 the step is skipped.
    """
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
    optimizer.found_inf = found_inf


@_writes
def take_flag_back(optimizer: Any) -> None:
    """Undo :func:`lend_flag` after the step."""
    del optimizer.grad_scale, optimizer.found_inf
