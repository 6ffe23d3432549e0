"""What xamp is told of the abacus. Importing this makes torch know the device, as a vendor's package does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from xamp.contract import Backend, Capabilities
from xamp.errors import BackendUnavailable
from xamp_abacus import device

__all__ = ["AbacusBackend"]

device.install()


class AbacusBackend(Backend):
    """The abacus: every level, by torch.autocast("abacus") and the CPU's kernels."""

    # Its own autocast lowers layer_norm, which the portable policy keeps in fp32.
    op_rules: Mapping[str, str] = {"layer_norm": "lower"}

    def probe(self) -> None:
        """See :meth:`xamp.contract.Backend.probe`."""
        two = torch.ones(4, 4, device="abacus") @ torch.ones(4, 4, device="abacus")
        if two.sum().item() != 64.0:
            raise BackendUnavailable("the abacus computes wrongly\ncheck its beads")

    def devices(self) -> Sequence[str]:
        """See :meth:`xamp.contract.Backend.devices`."""
        return ("Abacus",)

    def versions(self) -> Mapping[str, str]:
        """See :meth:`xamp.contract.Backend.versions`."""
        return {"torch": torch.__version__, "beads": "7"}

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        """See :meth:`xamp.contract.Backend.capabilities`."""
        return Capabilities(
            fast_dtypes=("bfloat16",),
            fused_optimizers=("SGD", "Adam", "AdamW", "Adagrad"),
            process_group="abacus_ccl",
        )
