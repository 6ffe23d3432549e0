"""Apple GPUs. Written from torch's documentation; this project has no such device to test on."""

from __future__ import annotations

from typing import Any

import torch

from xamp.backends.native import GPU_KERNELS, ModuleBackend

__all__ = ["MpsBackend"]


class MpsBackend(ModuleBackend):
    """Apple GPUs, by torch.autocast("mps"). torch has no collectives for them, so ranks communicate by the CPU."""

    fast_dtypes = ("float16",)  # bf16 is emulated before the M2
    process_group = "gloo"
    op_rules = {
        # The device's list gives fp32 even if the caller names another dtype.
        **dict.fromkeys(("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm"), "fp32"),
        # Without an entry the dtypes already match the table's.
        **dict.fromkeys(
            (
                "rnn_relu.data",
                "rnn_relu.input",
                "rnn_relu_cell",
                "rnn_tanh.data",
                "rnn_tanh.input",
                "rnn_tanh_cell",
            ),
            "same",
        ),
        # The kernel refuses fp16 and bf16, so torch's own fp32 rule stays.
        "conv_transpose3d.input": "same",
        **dict.fromkeys(GPU_KERNELS, "same"),
    }

    def is_available(self) -> bool:
        """See :meth:`xamp.backends.native.ModuleBackend.is_available`; every torch since 2.6 has this function."""
        return torch.backends.mps.is_available()

    def runtime(self, device_type: str) -> Any:
        """See :meth:`xamp.contract.Backend.runtime`: torch.mps, and two of its functions under torch.cuda's names."""
        return _Runtime()


class _Runtime:
    """torch.mps with torch.cuda's names for memory figures. It has one device and one queue, and no peaks."""

    def memory_allocated(self) -> int:
        """Bytes that tensors take up."""
        return torch.mps.current_allocated_memory()

    def memory_reserved(self) -> int:
        """Bytes that the driver has given to this process."""
        return torch.mps.driver_allocated_memory()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.mps, name)
