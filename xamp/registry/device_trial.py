"""Checks whether a device computes correctly in a dtype. Imports torch only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xamp.registry.causes import may_pass

if TYPE_CHECKING:
    import torch

__all__ = ["defect_of"]


def defect_of(device: torch.device, dtype: str, keeps_inf: bool = True) -> str:
    """Check that ``device`` computes in ``dtype`` as a training step needs; return the defect, or an empty text.

    This function multiplies two matrices, checks that an inf stays an inf, and finds it with the operator that unscales
    gradients. It waits for the device. It draws no random numbers, so a seeded run is not changed.

    Args:
        device: the device to check.
        dtype: the dtype's name.
        keeps_inf: False for a chip that saturates and raises a flag; then only the product is checked.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it can compute.
    """
    import torch

    try:
        kind: torch.dtype = getattr(torch, dtype)
        ones = torch.ones(8, 8, dtype=kind, device=device)
        if (ones @ ones).float().ne(8.0).any().item():
            return f"a product of two {dtype} matrices is wrong"
        if not keeps_inf:
            return ""
        overflowed = torch.full((8,), float("inf"), dtype=kind, device=device) * 1.0
        if not overflowed.isinf().all().item():
            return f"an inf in {dtype} does not stay one: the device saturates, and overflows would go unseen"
        found = torch.zeros(1, device=device)
        one = torch.ones(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([overflowed], found, one)
        if found.item() != 1.0:
            return f"the operator that unscales gradients overlooks an inf in {dtype}"
    except Exception as error:
        if may_pass(error):
            raise
        return f"computing in {dtype} fails: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""
