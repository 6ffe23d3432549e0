"""The range of a tensor's values: the smallest and the largest absolute value, and the shares of zeros, inf and nan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from xamp.torch_compat.torch_private.modes import is_traceable_wrapper_subclass

__all__ = ["Range", "dense", "is_finite", "range_of"]


@dataclasses.dataclass(frozen=True)
class Range:
    """What a tensor's values span.

    Attributes:
        dtype: the dtype's name, such as ``"float16"``.
        shape: the shape.
        smallest: the smallest absolute value above zero; 0.0 where there is none. Like ``largest``, of finite values.
        largest: the largest absolute value; 0.0 where there is none.
        zeros: the share of zeros, from 0 to 1.
        infs: the number of infinite elements.
        nans: the number of elements that are nan.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    zeros: float
    infs: int
    nans: int

    def __str__(self) -> str:
        parts = [f"|x| from {self.smallest:.3g} to {self.largest:.3g}"] if self.largest > 0 else []
        if parts or self.zeros > 0:
            parts.append(f"{self.zeros:.1%} zeros")
        else:
            parts.append("nothing finite" if self.infs or self.nans else "no value")
        if self.infs or self.nans:
            parts.append(f"{self.infs} inf, {self.nans} nan")
        return f"{self.dtype} {list(self.shape)}: " + ", ".join(parts)


def dense(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating and complex tensors that hold the values of ``value``; nothing where it has no such values.

    A sparse tensor gives its values, a DTensor and other wrappers what they wrap. Tensors without data give nothing.
    """
    if not isinstance(value, torch.Tensor):
        return
    inner = _wrapped(value)
    if inner is not None:
        for part in inner:
            yield from dense(part)
    elif value.layout is not torch.strided:
        yield from dense(value._values() if value.layout is torch.sparse_coo else value.values())
    elif (value.is_floating_point() or value.is_complex()) and value.device.type != "meta" and not value.is_quantized:
        yield value.detach()


def _wrapped(value: Any) -> list[Any] | None:
    """Return the tensors that a tensor of a wrapper class holds; None for any other."""
    if not is_traceable_wrapper_subclass(value):
        return None
    names, _ = value.__tensor_flatten__()
    return [getattr(value, name) for name in names]


def is_finite(value: Any) -> bool:
    """Return whether ``value`` holds no inf and no nan. Waits for the device."""
    return all(bool(_wide(part).isfinite().all()) for part in dense(value) if part.numel())


def range_of(value: torch.Tensor) -> Range:
    """Return the range of a tensor. Waits for the device."""
    parts = [_wide(part).reshape(-1) for part in dense(value)]
    flat = torch.cat([part.abs() for part in parts]) if parts else torch.zeros(0)
    finite = flat[flat.isfinite()]
    above = finite[finite > 0]
    nans = int(flat.isnan().sum())
    return Range(
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        smallest=float(above.min()) if above.numel() else 0.0,
        largest=float(finite.max()) if finite.numel() else 0.0,
        zeros=float((flat == 0).sum()) / max(flat.numel(), 1),
        infs=int(flat.isinf().sum()),
        nans=nans,
    )


def _wide(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` in a dtype for which every operator has a kernel; its values stay."""
    return part if part.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else _widened(part)


def _widened(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.complex64) if part.is_complex() else part.float()
