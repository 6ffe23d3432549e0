"""The plan of an optimizer's step: tables of pointers, built once, and the launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.rules import Row, Rule

__all__ = ["Plan", "bytes_moved"]

Grads = Sequence["torch.Tensor | None"]


class Plan:
    """The tensors of one optimizer on one device, in tables on that device. Launches go to the current stream.

    Gradients are given at each call, in the order of the rows: fp16, bf16 or fp32, of the row's shape and order in
    memory; None for a row that has none, which is then left alone, its count of steps too.

    Args:
        rule: what a step computes.
        rows: what it steps, with ``group`` as index into ``hyper``.
        wide: False for compilers without pointers made of integers and without fp64 (Ascend's): each tensor has
            launches of its own, and the host reads flag, counts and factors, and computes the corrections.
        block: elements that a program takes, a power of two.

    Attributes:
        launches: kernels and copies since the last :meth:`check` began, or since the last :meth:`step` began if none
            came before it. SGD, Adam, Adagrad: at most 4 without, 6 with clipping, if the options given to the check
            are still those of the step (5 and 7 else); LAMB and NovoGrad two more.

    Raises:
        ValueError: no rows, or one that does not suit: the message says which and why (see :func:`takes`).
    """

    launches: int

    def __init__(self, rule: Rule, rows: Sequence[Row], *, wide: bool = True, block: int = 2048) -> None:
        raise NotImplementedError

    def moved(self) -> bool:
        """Whether a tensor of a row lies elsewhere than when the plan was built: then build another."""
        raise NotImplementedError

    def suits(self, grads: Grads) -> bool:
        """Whether all gradients have a dtype, device, shape and order in memory that the kernels take."""
        raise NotImplementedError

    def check(
        self,
        grads: Grads,
        found_inf: torch.Tensor,
        inv_scale: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        hyper: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Read the gradients once: raise ``found_inf`` at an inf or nan, and sum the squares by block.

        Args:
            grads: one for each row, or None.
            found_inf: fp32, one element; becomes 1 where something is found and keeps what it holds otherwise.
            inv_scale: fp32, one element; 1 divided by the loss scale, None for 1. The norm is of unscaled values.
            norm: fp32, one element: gets the L2 norm of ``grads * inv_scale``, finite where fp64's is; one launch more.
                :meth:`checked_norm` gives it later too.
            hyper: the options of each group as they are now, which saves a copy if the step has the same.
        """
        raise NotImplementedError

    def checked_norm(self, inv_scale: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the L2 norm that the last check's pass summed, fp32, shape ``[]``; one launch, no read of gradients."""
        raise NotImplementedError

    def norm(self, grads: Grads, inv_scale: torch.Tensor | None = None, kind: float = 2.0) -> torch.Tensor:
        """Return the norm of ``grads * inv_scale``, fp32, shape ``[]``, by a pass of its own.

        Args:
            grads: as for :meth:`check`. What the last check summed stays.
            inv_scale: as for :meth:`check`.
            kind: the order, above 0; ``math.inf`` for the largest magnitude.
        """
        raise NotImplementedError

    def clip_factor(self, norm: torch.Tensor, limit: float, eps: float = 1e-6) -> torch.Tensor:
        """Return ``min(1, limit / (norm + eps))``, fp32, shape ``[]``, on the device, in one launch.

        nan stays nan, as in ``torch.nn.utils.clip_grad_norm_``. Apex's LAMB has ``eps`` 0.
        """
        raise NotImplementedError

    def step(
        self,
        grads: Grads,
        hyper: Sequence[Mapping[str, Any]],
        found_inf: torch.Tensor | None = None,
        inv_scale: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
    ) -> None:
        """Step all rows that have a gradient. Where ``found_inf`` is raised no bit changes, counts neither.

        The kernels do not raise the versions that autograd keeps of the tensors.

        Args:
            grads: one for each row, or None.
            hyper: the options of each group; see :class:`Rule`.
            found_inf: fp32, one element, read on the device; None: step.
            inv_scale: fp32, one element, on the device: gradients are multiplied by it; None for 1.
            clip: fp32, one element, on the device: gradients are multiplied by it too; None for 1.
        """
        raise NotImplementedError


def bytes_moved(plan: Plan, grads: Grads) -> int:
    """Return the bytes that a check and a step read and write: each element of each tensor so often as kernels do.

    AdamW at O2, fp16 gradients and weights: 30 a parameter (2 by the check, 14 read and 14 written by the step).
    """
    raise NotImplementedError
