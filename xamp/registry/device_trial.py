"""Checks whether a device computes correctly in a dtype. Imports torch only when it is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xamp.registry.causes import may_pass

if TYPE_CHECKING:
    import torch

__all__ = ["defect_of"]

Unscale = Callable[[Sequence["torch.Tensor"], "torch.Tensor", "torch.Tensor"], None]


def defect_of(
    device: torch.device,
    dtype: str,
    keeps_inf: bool = True,
    unscale_: Unscale | None = None,
    *,
    product_only: bool = False,
) -> str:
    """Check that ``device`` computes in ``dtype`` as a training step needs; return the defect, or an empty text.

    This function asks the device which operators on lists it has (:mod:`xamp.registry.kernel_trials`), multiplies two
    matrices, checks that an inf stays an inf, calls the single operators that a step calls in that dtype, copies and
    multiplies lists, and unscales gradients. It waits for the device. It draws no random numbers, so that a seeded run
    is not changed.

    Args:
        device: the device to check.
        dtype: the dtype's name.
        keeps_inf: False for a chip that saturates and raises a flag; then overflows are not checked.
        unscale_: the method of the backend that unscales; by default that of :class:`xamp.contract.Backend`.
        product_only: check a matrix product and nothing else: whether the device computes at all.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it can compute.
    """
    import torch

    from xamp.ground import kernels
    from xamp.registry.kernel_trials import ask_kernels
    from xamp.registry.trial_state import as_in_a_new_process

    try:
        kind: torch.dtype = getattr(torch, dtype)
        with as_in_a_new_process(device):
            if product_only:
                return _wrong_product(device, kind)
            ask_kernels(device, kind, keeps_inf)
            return (
                _wrong_product(device, kind)
                or (_lost_inf(device, kind) if keeps_inf else "")
                or _wrong_arithmetic(device, kind)
                or _wrong_lists(device, kind)
                or _wrong_unscaling(device, kind, keeps_inf, unscale_ or kernels.unscale_)
            )
    except Exception as error:
        if may_pass(error):
            raise
        return f"computing in {dtype} fails: {type(error).__name__}: {' '.join(str(error).split())}"


def _wrong_product(device: torch.device, kind: torch.dtype) -> str:
    import torch

    ones = torch.ones(8, 8, dtype=kind, device=device)
    wrong = (ones @ ones).float().ne(8.0).any().item()
    return f"a product of two {_name(kind)} matrices is wrong" if wrong else ""


def _lost_inf(device: torch.device, kind: torch.dtype) -> str:
    import torch

    overflowed = torch.full((8,), math.inf, dtype=kind, device=device) * 1.0
    if overflowed.isinf().all().item():
        return ""
    return f"an inf in {_name(kind)} does not stay one: the device saturates, and overflows would go unseen"


def _wrong_arithmetic(device: torch.device, kind: torch.dtype) -> str:
    """What is wrong with the operators on single tensors that the engine calls; some of them it calls in fp32 only."""
    import torch

    two = torch.full((4,), 2.0, dtype=kind, device=device)
    four = torch.empty_like(two).fill_(1.0).zero_().add_(two).mul_(two)
    right = [four.eq(4.0), two.isfinite(), four.ne(two), (two + two).eq(four), torch.linalg.vector_norm(two).eq(4.0)]
    if kind is torch.float32:
        largest, inverse = torch.maximum(two, four, out=two.clone()), torch.reciprocal(four, out=two.clone())
        right += [largest.clamp_(0.0, 3.0).eq(3.0), torch.where(largest.eq(3.0), inverse, two).eq(0.25)]
    if all(each.all().item() for each in right):
        return ""
    return f"sums, products and comparisons of {_name(kind)} tensors are wrong"


def _wrong_lists(device: torch.device, kind: torch.dtype) -> str:
    """What is wrong with copies from and to fp32, and with products by a factor on the device."""
    import torch

    from xamp.ground import kernels

    wide = torch.full((4,), 3.0, dtype=torch.float32, device=device)
    lowered = torch.zeros(4, dtype=kind, device=device)
    kernels.copy_([lowered], [wide])
    kernels.multiply_([lowered], torch.full((), 0.5, dtype=torch.float32, device=device))
    kernels.copy_([wide], [lowered])
    return "" if wide.eq(1.5).all().item() else f"copies and products of {_name(kind)} lists are wrong"


def _wrong_unscaling(device: torch.device, kind: torch.dtype, keeps_inf: bool, unscale_: Unscale) -> str:
    import torch

    half = torch.full((), 0.5, dtype=torch.float32, device=device)
    for value in (2.0, math.inf, math.nan) if keeps_inf else (2.0,):
        grads = [torch.full((), 2.0, dtype=kind, device=device), torch.full((3, 4), 2.0, dtype=kind, device=device)]
        grads[1][1, 2] = value
        found = torch.zeros((), dtype=torch.float32, device=device)
        unscale_(grads, found, half)
        if keeps_inf and found.item() != float(value != 2.0):
            seen = "sees an overflow where there is none" if value == 2.0 else f"overlooks {value}"
            return f"the operator that unscales gradients {seen} in {_name(kind)}"
        if any(grad.ne(1.0).sum().item() != (value != 2.0 and grad.dim() > 0) for grad in grads):
            return f"the operator that unscales gradients multiplies wrongly in {_name(kind)}"
    return ""


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
