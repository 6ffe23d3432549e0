"""``apex.contrib.clip_grad``: clips the norm of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients in place so that all together have at most the norm ``max_norm``, and return their norm.

    This is ``torch.nn.utils.clip_grad_norm_``, whose foreach form does what Apex's kernel did.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, float(max_norm), float(norm_type), error_if_nonfinite)
