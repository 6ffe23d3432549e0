"""Autograd: its nodes and their numbers, what runs around a backward, and the profiler's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "InferenceMode",
    "current_autograd_node",
    "current_graph_task_id",
    "get_sequence_nr",
    "is_profiling",
    "queue_callback",
    "set_grad_enabled",
    "wrap_checkpoint_generator",
]

get_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number that this thread's next node gets."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node that this thread's backward evaluates; None outside of one."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of this thread's backward; -1 outside of one."""

InferenceMode: Any = torch._C._InferenceMode
"""``torch.inference_mode`` as a block, without its decorator: 0.7 us less."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Lets a function be called at the end of this thread's backward."""


def wrap_checkpoint_generator(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the generator that runs a checkpoint without reentrance by what ``wrap`` makes of it."""
    from torch.utils import checkpoint  # torch 2.7 does not import it, and takes 240 ms

    if hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl"):  # which the other calls
        checkpoint._checkpoint_without_reentrant_generator_impl = wrap(
            checkpoint._checkpoint_without_reentrant_generator_impl
        )
    else:
        checkpoint._checkpoint_without_reentrant_generator = wrap(checkpoint._checkpoint_without_reentrant_generator)
