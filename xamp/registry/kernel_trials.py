"""Asks a device which of torch's operators on lists it has; :mod:`xamp.ground.kernels` does without the others.

Each trial calls one operator on a few small tensors and looks at the result. Nothing here is a list of devices: what
they lack differs between the generations of a card and between the releases of torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from xamp.ground import kernels
from xamp.ground.torch_private import operators
from xamp.registry.causes import may_pass
from xamp.registry.trial_state import as_in_a_new_process

__all__ = ["KERNELS", "Kernel", "Trial", "ask_kernels", "ask_once"]

_asked: set[tuple[str, torch.dtype]] = set()


@dataclasses.dataclass(frozen=True)
class Trial:
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
    """Find out which operators of :data:`KERNELS` the device lacks for ``dtype``, and note them.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it has.
    """
    with as_in_a_new_process(device):
        for kernel in KERNELS:
            asked = (not kernel.dtypes or dtype in kernel.dtypes) and (keeps_inf or not kernel.finds_inf)
            if asked and not _works(kernel, Trial(device, dtype, keeps_inf)):
                kernels.note(kernel.name, device.type, dtype)
    _asked.add((device.type, dtype))


def ask_once(device: torch.device, dtype: torch.dtype, keeps_inf: bool = True) -> None:
    """Do as :func:`ask_kernels`, unless that was done for this type of device."""
    if (device.type, dtype) not in _asked:
        ask_kernels(device, dtype, keeps_inf)


def _works(kernel: Kernel, trial: Trial) -> bool:
    try:
        return kernel.works(trial)
    except Exception as error:  # a device may refuse by any type of error
        if may_pass(error):
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
"""What a device is asked for: what the functions of :mod:`xamp.ground.kernels` call."""
