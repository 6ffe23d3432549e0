"""The CPU: every level runs. Only bf16 is fast, on processors with instructions for it."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from xamp.backend_kit import environment_settings
from xamp.backends import fp32, host
from xamp.backends.native import GPU_KERNELS, NativeBackend
from xamp.contract import Setting

__all__ = ["CpuBackend"]


class CpuBackend(NativeBackend):
    """Any machine's processor, by torch.autocast("cpu")."""

    process_group = "gloo"
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


@functools.cache
def has_native_bf16() -> bool:
    """Whether the processor has bf16 instructions: AVX512-BF16 or AMX on x86, the bf16 extension on ARM."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):  # private, so they may go in a later torch
        check = getattr(torch.cpu, name, None)
        if check is not None and check():
            return True
    if sys.platform == "darwin":
        return _sysctl("hw.optional.arm.FEAT_BF16") == "1"
    return arm_lists_bf16(_cpuinfo())


def arm_lists_bf16(cpuinfo: str) -> bool:
    """Whether the ``Features`` of an ARM processor, in the text of /proc/cpuinfo, include bf16."""
    features = re.search(r"^Features\s*:(.*)$", cpuinfo, re.MULTILINE)
    return features is not None and "bf16" in features[1].split()


@functools.cache
def processor_name() -> str:
    """The processor's name, as far as the system reports it."""
    named = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    if named is not None:
        return named[1].strip()
    if sys.platform == "darwin" and (brand := _sysctl("machdep.cpu.brand_string")):
        return brand
    return platform.processor() or platform.machine() or "cpu"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
