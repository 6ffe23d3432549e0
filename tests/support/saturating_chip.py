"""A stand-in for a chip that saturates: an overflow gives no inf; it raises a flag, which stays up until cleared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xamp.backends.cpu import CpuBackend
from xamp.contract import BackendSpec, Capabilities

SATURATING = BackendSpec("saturating", ("cpu",), "saturating_chip:SaturatingBackend", priority=500)


class SaturatingBackend(CpuBackend):
    """A saturating chip, emulated on the CPU.

    Attributes:
        overflowed: the chip's flag.
        calls: the names of the methods that training called, in order.
    """

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec)
        self.overflowed = False
        self.calls: list[str] = []

    def probe(self) -> None:
        super().probe()
        self.calls.clear()

    def keeps_inf(self, device: torch.device) -> bool:
        return False

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(overflow="flag", fused_optimizers=("SGD", "Adam"))

    def clear_overflow(self, device: torch.device) -> None:
        self.calls.append("clear_overflow")
        self.overflowed = False

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        self.calls.append("unscale_")
        if self.overflowed:
            found_inf.fill_(1.0)
        for grad in grads:
            grad.mul_(inv_scale)

    def make_overflow_(self, grad: torch.Tensor) -> None:
        self.overflowed = True
        grad.fill_(65504.0)
