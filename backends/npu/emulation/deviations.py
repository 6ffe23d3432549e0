"""Operators of the card that are known to differ from the CPU's; in these the emulation follows the card.

It lists only differences that published source shows. How the card's own kernels differ is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CHANNELS_LAST", "DEVIATIONS", "Deviation", "apply", "are_plain", "formats", "has_private", "is_private"]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One such difference.

    Attributes:
        operator: the overload.
        effect: what the card does.
        source: the source file that shows it.
        unread: keyword arguments that the card's kernel accepts but ignores.
        refuse: from the arguments to the reason why the card refuses them; an empty string if it does not.
    """

    operator: str
    effect: str
    source: str
    unread: tuple[str, ...] = ()
    refuse: Callable[..., str] | None = None


CHANNELS_LAST = "xamp.accel.channels_last is the memory format that the device in use takes"
"""What the errors about memory formats say beside torch_npu's own words."""


def _no_momentum(*args: Any, momentum: float, **kwargs: Any) -> str:  # noqa: ARG001
    return "" if momentum > 0 else f"momentum must be positive, but got {momentum}"


def _other_format(tensor: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> str:
    if memory_format is torch.contiguous_format or tensor.is_contiguous(memory_format=memory_format):
        return ""
    words = "NPU contiguous operator only supported contiguous memory format."
    return f"{words} {CHANNELS_LAST}\nERR01007 OPS feature not supported"


_FUSED_SGD = "op-plugin, FusedSgdKernelOpApi.cpp"
_NO_PLAIN_SGD = "refuses to step without momentum"

DEVIATIONS = (
    Deviation(
        "aten::_fused_adamw_",
        "steps on gradients that are still scaled, and steps where there was an overflow",
        "op-plugin, FusedAdamWKernelNpuOpApi.cpp: neither is passed to aclnnApplyAdamWV2",
        unread=("grad_scale", "found_inf"),
    ),
    Deviation("aten::_fused_sgd_", _NO_PLAIN_SGD, _FUSED_SGD, refuse=_no_momentum),
    Deviation("aten::_fused_sgd_.tensor_lr", _NO_PLAIN_SGD, _FUSED_SGD, refuse=_no_momentum),
    Deviation(
        "aten::contiguous",
        "knows no channels_last",
        "torch_npu, TensorProperties.cpp",
        refuse=_other_format,
    ),
)
"""The deviations. Also ``_to_copy`` refuses channels_last (torch_npu, ToKernelNpu.cpp), and old chips bfloat16."""


# These operators have only one kernel on the card, which refuses private storage formats; others have a second kernel
# that accepts them. (torch_npu's library contains the text of the refusal for each.)
_WITHOUT_FORMATS = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd")
_PLAIN_FORMATS = frozenset((0, 1, 2, 30))

formats: set[int] = set()
"""Storage formats to which this process has cast tensors. If there are no private ones, no tensor is checked."""


def apply(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` of operator ``name``, with the card's deviations."""
    for row in DEVIATIONS:
        if row.operator == name:
            kernel = _deviating(row, kernel)
    return _without_formats(name, kernel) if name.startswith(_WITHOUT_FORMATS) else kernel


def _without_formats(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    short = name.partition("::")[2].partition(".")[0]

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if has_private() and any(is_private(each) for arg in args for each in _tensors(arg)):
            raise RuntimeError(f"Current operator {short} do not support internal format. (emulated Ascend)")
        return kernel(*args, **kwargs)

    return refusing


def _tensors(argument: Any) -> list[torch.Tensor]:
    several = argument if isinstance(argument, (list, tuple)) else [argument]
    return [each for each in several if isinstance(each, torch.Tensor)]


def are_plain(*found: int) -> bool:
    """Whether these formats all lay a tensor out as torch does."""
    return _PLAIN_FORMATS.issuperset(found)


def has_private() -> bool:
    """Whether this process has made a tensor in a private format."""
    return not formats <= _PLAIN_FORMATS


def is_private(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a private storage format."""
    return tensor.get_device() >= 0 and torch.ops.npu.get_npu_format(tensor) not in _PLAIN_FORMATS


def _deviating(row: Deviation, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def deviating(*args: Any, **kwargs: Any) -> Any:
        if row.refuse is not None and (reason := row.refuse(*args, **kwargs)):
            raise RuntimeError(f"{reason} (emulated Ascend, {row.operator})")
        return kernel(*args, **{key: value for key, value in kwargs.items() if key not in row.unread})

    return deviating
