"""The CPU: every level runs. Only bf16 is fast, on processors with instructions for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from xamp.backend_kit import environment_settings
from xamp.backends import fp32
from xamp.backends.native import GPU_KERNELS, NativeBackend
from xamp.backends.processor import has_native_bf16, processor_name
from xamp.contract import Setting

__all__ = ["CpuBackend"]


class CpuBackend(NativeBackend):
    """Any machine's processor, by torch.autocast("cpu")."""

    process_group = "gloo"
    fp8_rehearsed = ("tensorwise", "rowwise", "rowwise_gw_hp", "mxfp8")
    op_rules = {
        "grid_sampler": "fp32",
        "binary_cross_entropy": "fp32",
        # Without an entry the dtypes already match the table's.
        **dict.fromkeys(("rnn_relu_cell", "rnn_tanh_cell"), "same"),
        **dict.fromkeys(GPU_KERNELS, "same"),
    }

    def devices(self) -> Sequence[str]:
        """See :meth:`xamp.contract.Backend.devices`: one device, however many sockets there are."""
        return (processor_name(),)

    def fast_dtypes_of(self, device: torch.device | None = None) -> tuple[str, ...]:
        """bf16 if the processor multiplies in it; never fp16, because no CPU kernel of torch is fast in fp16."""
        return ("bfloat16",) if has_native_bf16() else ()

    def runtime(self, device_type: str) -> ModuleType:
        """See :meth:`xamp.contract.Backend.runtime`."""
        from xamp.backends import host  # a training need not load it

        return host

    def capture_check(self, device: torch.device) -> None:
        """See :meth:`xamp.contract.Backend.capture_check`: a processor has no graphs, and no step need ask."""

    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        """See :meth:`xamp.contract.Backend.precision_settings`: oneDNN's switches and environment variables."""
        return [*_switch_settings(), *environment_settings(_VARIABLES, narrowing=_NARROWING)]


def _switch_settings() -> Iterator[Setting]:
    for what, group, switch in _SWITCHES:
        if dtype := switch.narrow():
            name = f"torch.backends.{group}.fp32_precision"
            yield Setting(
                name,
                repr(dtype),
                f"float32 {what} may be computed in {dtype}, where the processor can, at every level",
                f'{name} = "ieee"',
                narrows_fp32=True,
                exact=switch.make_exact,
            )


_SWITCHES = (
    ("matrix products", "mkldnn.matmul", fp32.HOST_PRODUCTS),
    ("convolutions", "mkldnn.conv", fp32.host_switch("mkldnn.conv")),
    ("RNNs", "mkldnn.rnn", fp32.host_switch("mkldnn.rnn")),
)
_NARROWING = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_LOWER_FP32 = "oneDNN may compute float32 in a lower dtype, where processor and build allow it, at every level"
_FEWER_INSTRUCTIONS = "newer instructions of the processor are not used: other rounding, and bfloat16 may be slow"
# By name: values without an effect, the effect of other values, whether it is only a note.
_VARIABLES = {
    "ONEDNN_DEFAULT_FPMATH_MODE": ("strict", _LOWER_FP32, False),
    "DNNL_DEFAULT_FPMATH_MODE": ("strict", _LOWER_FP32, False),  # the name before oneDNN 2.0, still read
    "ONEDNN_MAX_CPU_ISA": ("default all", _FEWER_INSTRUCTIONS, True),
    "DNNL_MAX_CPU_ISA": ("default all", _FEWER_INSTRUCTIONS, True),
    "ATEN_CPU_CAPABILITY": ("", _FEWER_INSTRUCTIONS, True),
}
