"""Tries a device: does it compute correctly in a dtype, and which of torch's operators on lists has it?

Each trial calls something on a few small tensors and checks the result. Nothing here is a list of devices: what they
lack differs between the generations of a card and between the releases of torch. :mod:`xamp.torch_compat.kernels` does
without the operators that a device lacks. :mod:`xamp.registry.device_trials` says how a trial runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from xamp.contract import Backend
from xamp.registry.device_trials import as_in_a_new_process, finds_nothing
from xamp.torch_compat import kernels
from xamp.torch_compat.torch_private import operators

__all__ = ["KERNELS", "Kernel", "Trial", "ask_kernels", "ask_once", "defect_of", "fp8_recipes"]

Unscale = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]

# --- which operators it has

_asked: set[tuple[str, torch.dtype]] = set()


class Trial(NamedTuple):
    """Where an operator is tried.

    Attributes:
        device: the device.
        dtype: the dtype of the tensors.
        keeps_inf: False on a chip that saturates; then inf and nan are left out.
    """

    device: torch.device
    dtype: torch.dtype
    keeps_inf: bool = True

    def pair(self, dtype: torch.dtype | None = None) -> Any:
        """Two tensors, full of 1 and 2, of two shapes: torch has other code for lists of one shape."""
        made = {"dtype": dtype or self.dtype, "device": self.device}
        return [torch.full((5,), 1.0, **made), torch.full((2, 3), 2.0, **made)]  # type: ignore[call-overload]

    def number(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A scalar tensor."""
        return torch.full((), value, dtype=dtype, device=self.device)

    def spoilt(self) -> Iterator[torch.Tensor]:
        """A tensor with one inf in it, and one with one nan; none on a chip that saturates."""
        for value in (math.inf, math.nan) if self.keeps_inf else ():
            tensor = self.pair()[1]
            tensor[1, 1] = value
            yield tensor


class Kernel(NamedTuple):
    """One operator.

    Attributes:
        name: its name in ``torch``.
        works: calls it, and returns whether the result is right.
        dtypes: the dtypes for which the device is asked; empty: every dtype that it computes in.
        finds_inf: it looks for inf and nan, so that it says nothing on a chip that saturates.
    """

    name: str
    works: Callable[[Trial], bool]
    dtypes: tuple[torch.dtype, ...] = ()
    finds_inf: bool = False


def ask_kernels(device: torch.device, dtype: torch.dtype, keeps_inf: bool = True) -> None:
    """Find out which operators of :data:`KERNELS` the device lacks for ``dtype``, and record them.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it has.
    """
    with as_in_a_new_process(device):
        for kernel in KERNELS:
            asked = (not kernel.dtypes or dtype in kernel.dtypes) and (keeps_inf or not kernel.finds_inf)
            if asked and not _works(kernel, Trial(device, dtype, keeps_inf)):
                kernels.record_missing(kernel.name, device.type, dtype)
    _asked.add((device.type, dtype))


def ask_once(device: torch.device, dtype: torch.dtype, keeps_inf: bool = True) -> None:
    """Do as :func:`ask_kernels`, unless that was done for this type of device."""
    if (device.type, dtype) not in _asked:
        ask_kernels(device, dtype, keeps_inf)


def _works(kernel: Kernel, trial: Trial) -> bool:
    try:
        return kernel.works(trial)
    except Exception as error:  # a device may refuse by any type of error
        if finds_nothing(error):
            raise
        return False


def _holds(tensors: Iterable[torch.Tensor], *wanted: float) -> bool:
    return all(bool(t.eq(value).all()) for t, value in zip(tensors, wanted, strict=True))


def _copies(trial: Trial) -> bool:
    there, wide, back = trial.pair(), trial.pair(torch.float32), trial.pair(torch.float32)
    operators.foreach_copy_(there, [2 * each for each in wide])
    operators.foreach_copy_(back, there)
    return _holds(there, 2.0, 4.0) and _holds(back, 2.0, 4.0)


def _interpolates(trial: Trial) -> bool:
    found = trial.pair()
    operators.foreach_lerp_(found, [torch.zeros_like(each) for each in found], 0.5)
    return _holds(found, 0.5, 1.0)


def _takes_norms(trial: Trial) -> bool:
    pair, own = trial.pair(), trial.dtype if trial.dtype is torch.float64 else torch.float32  # fp64 is not narrowed
    largest, sums = operators.foreach_norm(pair, math.inf), operators.foreach_norm(pair, 1, dtype=own)
    spoilt = [*trial.spoilt()]
    found = operators.foreach_norm(spoilt, math.inf) if spoilt else ()
    return _holds(largest, 1.0, 2.0) and _holds(sums, 5.0, 12.0) and not any(bool(norm.isfinite()) for norm in found)


def _multiplies(trial: Trial) -> bool:
    found = trial.pair()
    operators.foreach_mul_(found, trial.number(0.5, trial.dtype))
    operators.foreach_mul_(found, [trial.number(0.5).reshape(1)] * 2)
    return _holds(found, 0.25, 0.5)


def _unscales(trial: Trial) -> bool:
    for spoilt in (None, *trial.spoilt()):
        grads, found = trial.pair(), trial.number(0.0)
        given = grads if spoilt is None else [*grads, spoilt]
        operators.amp_foreach_non_finite_check_and_unscale_(given, found, trial.number(0.5))
        if found.item() != (0.0 if spoilt is None else 1.0) or not _holds(grads, 0.5, 1.0):
            return False
    return True


def _updates(trial: Trial) -> bool:
    scale, tracker, seen = trial.number(8.0), trial.number(0, torch.int32), []
    for flag in (0.0, 0.0, 1.0):
        operators.amp_update_scale_(scale, tracker, trial.number(flag), 4.0, 0.5, 2)
        seen.append((scale.item(), tracker.item()))
    return seen == [(8.0, 1), (32.0, 0), (16.0, 0)]


KERNELS = (
    Kernel("_foreach_copy_", _copies),
    Kernel("_foreach_lerp_", _interpolates),
    Kernel("_foreach_norm", _takes_norms),
    Kernel("_foreach_mul_", _multiplies),
    Kernel("_amp_foreach_non_finite_check_and_unscale_", _unscales, finds_inf=True),
    Kernel("_amp_update_scale_", _updates, (torch.float32,)),
)
"""What a device is asked for: what the functions of :mod:`xamp.torch_compat.kernels` call."""


# --- whether it computes correctly


def defect_of(
    device: torch.device,
    dtype: str,
    keeps_inf: bool = True,
    unscale_: Unscale | None = None,
    *,
    product_only: bool = False,
) -> str:
    """Check that ``device`` computes in ``dtype`` as a training step needs; return the defect, or an empty text.

    This function asks the device which operators on lists it has (:func:`ask_kernels`), multiplies two matrices, checks
    that an inf stays an inf, calls the single operators that a step calls in that dtype, copies and multiplies lists,
    and unscales gradients. It waits for the device. It draws no random numbers, so that a seeded run is not changed.

    Args:
        device: the device to check.
        dtype: the dtype's name.
        keeps_inf: False for a chip that saturates and raises a flag; then overflows are not checked.
        unscale_: the method of the backend that unscales; by default that of :class:`xamp.contract.Backend`.
        product_only: check a matrix product and nothing else: whether the device computes at all.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it can compute.
    """
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
        if finds_nothing(error):
            raise
        return f"computing in {dtype} fails: {type(error).__name__}: {' '.join(str(error).split())}"


def _wrong_product(device: torch.device, kind: torch.dtype) -> str:
    ones = torch.ones(8, 8, dtype=kind, device=device)
    wrong = (ones @ ones).float().ne(8.0).any().item()
    return f"a product of two {_name(kind)} matrices is wrong" if wrong else ""


def _lost_inf(device: torch.device, kind: torch.dtype) -> str:
    overflowed = torch.full((8,), math.inf, dtype=kind, device=device) * 1.0
    if overflowed.isinf().all().item():
        return ""
    return f"an inf in {_name(kind)} does not stay one: the device saturates, and overflows would go unseen"


def _wrong_arithmetic(device: torch.device, kind: torch.dtype) -> str:
    """What is wrong with the operators on single tensors that the engine calls; some of them it calls in fp32 only."""
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
    wide = torch.full((4,), 3.0, dtype=torch.float32, device=device)
    low_precision = torch.zeros(4, dtype=kind, device=device)
    kernels.copy_([low_precision], [wide])
    kernels.multiply_([low_precision], torch.full((), 0.5, dtype=torch.float32, device=device))
    kernels.copy_([wide], [low_precision])
    return "" if wide.eq(1.5).all().item() else f"copies and products of {_name(kind)} lists are wrong"


def _wrong_unscaling(device: torch.device, kind: torch.dtype, keeps_inf: bool, unscale_: Unscale) -> str:
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


def fp8_recipes(backend: Backend, device: torch.device) -> tuple[str, ...]:
    """The recipes of fp8 that are found right on a device, other than by products in fp32; the fastest first.

    Args:
        backend: casts and multiplies.
        device: the device.
    """
    from xamp.registry.fp8_trials import right_recipes  # what has no fp8 need not load it

    return right_recipes(backend, device)
