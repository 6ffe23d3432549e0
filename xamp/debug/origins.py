"""Which inf and nan are no fault: those that a program writes on purpose, and memory that nobody has written yet.

Attention masks hold -inf, a running maximum starts there, ``torch.empty`` holds whatever the memory held before. What
is computed from such values holds inf again. :class:`Origins` remembers the memory in question, and
:meth:`Origins.judge` tells a fault from what follows of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from xamp.debug.places import storage_of
from xamp.debug.ranges import dense, is_finite
from xamp.torch_compat.torch_private.modes import tree_iter

__all__ = ["Origins", "Verdict"]

Verdict = Literal["", "fault", "outside"]
"""What :meth:`Origins.judge` says: no fault; the operator's own fault; or it came in with a tensor from outside."""

_RAW = ("empty", "new_empty", "resize_", "set_")  # operators whose result nobody has written: names begin so
_FILLING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "_foreach_copy_")
_TURNING = ("neg", "sub", "rsub", "mul", "div", "abs", "reciprocal", "sign", "_softmax_backward_data", "pow")


class Origins:
    """Remembers which memory holds inf on purpose, and which holds nothing yet."""

    def __init__(self) -> None:
        self._meant: dict[int, bool] = {}  # address -> may hold nan besides inf
        self._raw: set[int] = set()

    def judge(
        self,
        name: str,
        operands: Any,
        sources: Sequence[torch.Tensor],
        bad: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> tuple[Verdict, torch.Tensor | None]:
        """Judge an operator with a result that is not finite.

        Args:
            name: the operator's name, without its overload.
            operands: all its arguments.
            sources: the tensors among them that were not finite before it ran, as they were.
            bad: its results that are not finite.
            written: the tensors among its arguments that it writes into.

        Returns:
            The verdict; for ``"outside"`` the tensor that came in.
        """
        if name.startswith(_RAW):
            self._raw.update(_addresses(bad))
            return "", None
        raw = [found for found in sources if storage_of(found) in self._raw]
        into_raw = any(storage_of(found) in self._raw for found in written)
        if name.startswith(_FILLING):
            sources = [s for s in sources if not any(storage_of(s) == storage_of(w) for w in written)]
        elif raw or into_raw:
            self._raw.update(_addresses(bad))
            return "", None
        if _writes_inf(operands):
            self._mean(bad)
            return "", None
        outside = [found for found in sources if storage_of(found) not in self._meant]
        masks = [found for found in outside if _is_mask(found)]
        if len(masks) < len(outside):
            return "outside", next(found for found in outside if not any(found is mask for mask in masks))
        self._mean(masks)
        if sources and not _adds(name, sources, bad, any(self._meant.get(storage_of(s) or 0) for s in sources)):
            self._mean(bad)
            return "", None
        return "fault", None

    def forget(self, results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        """Note finite results: new memory, and memory that is finite as a whole, holds nothing on purpose any more."""
        if not self._meant and not self._raw:
            return
        given = _addresses(operands)
        for result in results:
            address = storage_of(result)
            if address is None or (address not in self._meant and address not in self._raw):
                continue
            if address not in given or result.untyped_storage().nbytes() == result.numel() * result.element_size():
                self._meant.pop(address, None)
                self._raw.discard(address)

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            address = storage_of(tensor)
            if address is not None:
                self._meant[address] = any(bool(part.isnan().any()) for part in dense(tensor))
                self._raw.discard(address)


def _addresses(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {address for tensor in tensors if (address := storage_of(tensor)) is not None}


def _writes_inf(operands: Any) -> bool:
    """Return whether a number among the arguments is inf or nan: ``masked_fill(mask, -inf)``."""
    return any(isinstance(value, float) and not math.isfinite(value) for value in tree_iter(operands))


def _is_mask(value: torch.Tensor) -> bool:
    """Return whether ``value`` holds nothing but zeros and -inf, as a mask that is added to scores."""
    parts = [part.float() for part in dense(value) if not part.is_complex()]
    return bool(parts) and all(bool(((part == 0) | (part == -math.inf)).all()) for part in parts)


def _signs(tensors: Sequence[torch.Tensor]) -> tuple[bool, bool, bool]:
    """Return whether the tensors hold +inf, -inf and nan."""
    parts = [part for tensor in tensors for part in dense(tensor)]
    real = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
    return (
        any(bool((part == math.inf).any()) for part in real),
        any(bool((part == -math.inf).any()) for part in real),
        any(bool(part.isnan().any()) for part in real),
    )


def _adds(name: str, sources: Sequence[torch.Tensor], bad: Sequence[torch.Tensor], nan_meant: bool) -> bool:
    """Return whether results hold what cannot follow from inf in the arguments: nan, or inf of another sign."""
    plus, minus, nan = _signs(sources)
    more, less, broken = _signs(bad)
    if broken and not nan and not nan_meant:
        return True
    if name.startswith(_TURNING):
        return False
    return (more and not plus and not nan) or (less and not minus and not nan) or _has_more(sources, bad)


def _has_more(sources: Sequence[torch.Tensor], bad: Sequence[torch.Tensor]) -> bool:
    """Return whether, element by element, there are more inf in the results than the arguments can bring."""
    for result in bad:
        alike = [s for s in sources if result.numel() and s.numel() and result.numel() % s.numel() == 0]
        if len(alike) < len(sources):
            return False
        brought = sum(_count(source) * (result.numel() // source.numel()) for source in alike)
        if result.shape[-1:] == sources[0].shape[-1:] and _count(result) > brought:
            return True
    return False


def _count(tensor: torch.Tensor) -> int:
    return 0 if is_finite(tensor) else sum(int((~part.isfinite()).sum()) for part in dense(tensor))
