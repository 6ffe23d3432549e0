"""Operators of the table that only NVIDIA's GPUs, and what stands in for them, have kernels of."""

from __future__ import annotations

__all__ = ["GPU_KERNELS"]

GPU_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
)
"""In the order of the alphabet; the last two are cuDNN's."""
