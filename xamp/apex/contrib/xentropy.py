"""``apex.contrib.xentropy``: cross entropy with label smoothing and a label that counts nothing."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """The loss of each row, without reduction. Call ``SoftmaxCrossEntropyLoss.apply(logits, labels, ...)``.

    The arguments of ``apply``:

    - ``logits``: shape ``[rows, classes]``, any floating dtype.
    - ``labels``: integers, shape ``[rows]``.
    - ``smoothing``: the part of the label that is spread over all classes. 0.0 by default.
    - ``padding_idx``: rows with this label have loss and gradient 0, also where no class has it (-1, -100). It is 0
      by default.
    - ``half_to_float``: return fp32 losses for 16-bit logits. False by default.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Return the losses, shape ``[rows]``; in the dtype of the logits unless ``half_to_float``."""
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        log_sum = torch.logsumexp(wide, dim=-1)
        ignored = labels == padding_idx
        classes = labels.long().masked_fill(ignored, 0)  # the label that is ignored need not be a class
        hit = wide.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
        losses = log_sum - (1.0 - smoothing) * hit
        if smoothing:
            losses = losses - smoothing * wide.mean(dim=-1)
        losses = losses.masked_fill(ignored, 0.0)
        ctx.save_for_backward(logits, log_sum, classes, ignored)
        ctx.smoothing = smoothing
        return losses if half_to_float else losses.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient of the logits, in their dtype."""
        logits, log_sum, classes, ignored = ctx.saved_tensors
        weight = grads[0].to(log_sum.dtype).unsqueeze(-1)
        found = torch.exp(logits.to(log_sum.dtype) - log_sum.unsqueeze(-1))
        found -= ctx.smoothing / logits.size(-1)
        found.scatter_add_(-1, classes.unsqueeze(-1), torch.full_like(log_sum, ctx.smoothing - 1.0).unsqueeze(-1))
        found = (found * weight).masked_fill(ignored.unsqueeze(-1), 0.0)
        return found.to(logits.dtype), None, None, None, None
