"""Clips gradients that wait for a step in one pass: by a factor, which the pass reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["clip_waiting"]


def clip_waiting(
    states: Sequence[Any], max_norm: Any, norm_type: Any, check: Callable[[torch.Tensor], object]
) -> torch.Tensor | None:
    """Clip the gradients of some optimizers as one vector, and return their norm; None where not all of them wait.

    Args:
        states: what xamp keeps for each optimizer; None: it keeps nothing.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm.
        check: refuses a norm, before anything is clipped.
    """
    for state in states:
        if state is None or state.gradients.waiting is None:
            return None
        state.check_ready("master_params(optimizer)")
    found = [state.gradients.waiting_norm(norm_type) for state in states]
    norms: list[torch.Tensor] = [norm for norm in found if norm is not None]
    if not norms or len(norms) < len(found):
        return None
    norm = norms[0]
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack([each.to(norm.device) for each in norms]), float(norm_type))
    check(norm)
    for state, own in zip(states, norms, strict=True):
        state.gradients.clip_waiting(norm.to(own.device), max_norm)
        state.norm = norm
    return norm
