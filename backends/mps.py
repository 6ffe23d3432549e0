"""Apple's GPUs. Written from torch's documentation; this project has none to test on."""

from __future__ import annotations

import torch

from xamp.backends.native import ModuleBackend

__all__ = ["MpsBackend"]


class MpsBackend(ModuleBackend):
    """Apple GPUs, by torch.autocast("mps"). torch has no collectives for them, so ranks talk through the CPU."""

    fast_dtypes = ("float16",)  # bf16 is emulated before the M2
    process_group = "gloo"

    def is_available(self) -> bool:
        """See :meth:`xamp.backends.native.ModuleBackend.is_available`: asked where every torch since 2.6 answers."""
        return torch.backends.mps.is_available()
