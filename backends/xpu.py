"""Intel GPUs. Written from torch's documentation; this project has no such device to test on."""

from __future__ import annotations

from xamp.backends.native import CUDNN_KERNELS, ModuleBackend

__all__ = ["XpuBackend"]


class XpuBackend(ModuleBackend):
    """Intel GPUs, by torch.autocast("xpu")."""

    fast_dtypes = ("bfloat16", "float16")
    process_group = "xccl"
    op_rules = dict.fromkeys(
        (
            # Without an entry the dtypes already match the table's.
            "rnn_relu.data",
            "rnn_relu.input",
            "rnn_tanh.data",
            "rnn_tanh.input",
            *CUDNN_KERNELS,
        ),
        "same",
    )
