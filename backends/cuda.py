"""GPUs that torch calls ``cuda``: NVIDIA GPUs, and AMD GPUs through ROCm."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xamp.backend_kit import environment_settings, first_line, fp8_recipes
from xamp.backends import cudnn_rnn, fp32
from xamp.backends.native import ModuleBackend
from xamp.contract import RecurrentLayer, Setting
from xamp.errors import BackendUnavailable

__all__ = ["CudaBackend"]

_INSTALL = "install a CUDA or ROCm build of torch, chosen at https://pytorch.org/get-started/locally"
# The AMD architectures with matrix instructions for bf16; the others emulate it.
_AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx12")
_FNUZ = {"e4m3": "float8_e4m3fnuz", "e5m2": "float8_e5m2fnuz"}
_ADA = (8, 9)
"""The first compute capability of NVIDIA that multiplies in fp8."""
_AMD_WITHOUT_FP16 = ("gfx7", "gfx80")
# NVIDIA compute capabilities before 7.0 with fp16 at twice the rate of fp32; 6.1 runs fp16 at a 64th of it.
_NVIDIA_WITH_FP16 = ((5, 3), (6, 0), (6, 2))
_TRANSFER = "torch_npu.contrib.transfer_to_npu"
_TELLING = ("init", "current_device", "set_device", "get_device_properties")  # a patch of torch.cuda replaces these
_DETERMINISM = "a cuBLAS workspace of fixed size: results repeat, some products are slower"
_TF32 = "10 bits of mantissa instead of 23"


class CudaBackend(ModuleBackend):
    """NVIDIA and AMD GPUs, by torch.autocast("cuda") and scaling on the device."""

    process_group = "nccl"
    left_out = "this card only emulates it"
    # They call cuDNN or MIOpen, for which torch's autocast has entries that cast to fp16 (ATen/cudnn/AutocastRNN.cpp,
    # ATen/miopen/AutocastRNN.cpp).
    op_rules = dict.fromkeys([f"{layer}.{form}" for layer in cudnn_rnn.MODES for form in ("data", "input")], "float16")

    def require_device(self) -> None:
        """See :meth:`xamp.backends.native.NativeBackend.require_device`."""
        owner = stand_in()
        if owner:
            raise BackendUnavailable(f"torch.cuda is not torch's own: {owner}\n{_leave_out(owner)}")
        if torch.version.cuda is None and torch.version.hip is None:
            raise BackendUnavailable(f"this torch ({torch.__version__}) is built without CUDA and ROCm\n{_INSTALL}")
        try:
            self.module.init()  # is_available() would swallow the reason
        except Exception as error:
            cure = "run nvidia-smi or rocm-smi, and `python -m torch.utils.collect_env`"
            raise BackendUnavailable(f"torch.cuda.init() failed: {first_line(error)}\n{cure}") from error

    def dtypes(self, device: torch.device | None = None) -> tuple[str, ...]:
        """fp16 on all GPUs; bf16 if the GPU computes in it natively, not by emulation."""
        with _current(device):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("float16", "bfloat16") if has_bf16 else ("float16",)

    def fast_dtypes_of(self, device: torch.device | None = None) -> tuple[str, ...]:
        """The dtypes in which the GPU computes at a higher rate than in fp32, bf16 first."""
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return fast_on_amd(str(getattr(properties, "gcnArchName", "")))
        return fast_on_nvidia((properties.major, properties.minor))

    def fp8_of(self, device: torch.device) -> tuple[str, ...]:
        """What a trial finds, on a GPU that has products in fp8 at all."""
        properties = torch.cuda.get_device_properties(device)
        architecture = str(getattr(properties, "gcnArchName", "")) if torch.version.hip is not None else ""
        has_fp8 = (
            architecture.startswith(_AMD_WITH_FP8) if architecture else (properties.major, properties.minor) >= _ADA
        )
        return fp8_recipes(self, device) if has_fp8 else ()

    @functools.cached_property
    def fp8_formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """See :class:`xamp.contract.Backend`: MI300 has formats without a negative zero, of their own range."""
        hip = torch.version.hip is not None
        own = hip and str(getattr(torch.cuda.get_device_properties(), "gcnArchName", "")).startswith("gfx94")
        return _FNUZ if own else super().fp8_formats

    def versions(self) -> Mapping[str, str]:
        """See :meth:`xamp.contract.Backend.versions`: torch, CUDA or HIP, cuDNN or MIOpen, and the driver."""
        hip = torch.version.hip
        found = {"torch": torch.__version__, **({"hip": hip} if hip else {"cuda": str(torch.version.cuda)})}
        cudnn: Any = torch.backends.cudnn  # has no types
        if cudnn.is_available():
            found["miopen" if hip else "cudnn"] = str(cudnn.version())
        driver = _driver_version()
        return {**found, "driver": driver} if driver else found

    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        """See :meth:`xamp.contract.Backend.precision_settings`: TF32, reductions, cuDNN's freedom, the environment."""
        hip = torch.version.hip is not None
        off = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"  # overrides every switch
        tf32 = not (hip or off) and torch.cuda.get_device_properties(device).major >= 8
        recurrent = cudnn_rnn.settings(device)
        return [*(_tf32_settings() if tf32 else ()), *_switch_settings(), *recurrent, *_variable_settings(hip)]

    def join_weights_(self, weights: Sequence[torch.Tensor], layer: RecurrentLayer) -> None:
        """See :meth:`xamp.contract.Backend.join_weights_`: in cuDNN's layout, where cuDNN runs the layer."""
        cudnn_rnn.join_(weights, layer)


def stand_in() -> str:
    """Who has put another device behind torch.cuda, as the end of a sentence; empty if torch.cuda is torch's own.

    Such a patch makes scripts for GPUs run on other devices. It overwrites the functions of torch.cuda in place, so
    ``torch.cuda.is_available()`` no longer refers to NVIDIA or AMD.
    """
    if _TRANSFER in sys.modules:
        return f"{_TRANSFER} is active, and what it calls cuda is an NPU"
    owners = {str(getattr(getattr(torch.cuda, name, None), "__module__", None) or "torch") for name in _TELLING}
    foreign = sorted(owner for owner in owners if owner.partition(".")[0] != "torch")
    if foreign:
        return f"{foreign[0]} has replaced its functions, and what they call cuda is another device"
    if torch.version.cuda is None and torch.version.hip is None and torch.cuda.is_available():
        return "this torch is built without CUDA and ROCm, yet torch.cuda.is_available() is True"
    return ""


def _leave_out(owner: str) -> str:
    if owner.startswith(_TRANSFER):
        return (
            "xamp needs no such patch: take out `from torch_npu.contrib import transfer_to_npu`, unset "
            "TORCH_TRANSFER_TO_NPU, and let xamp.device() name the device"
        )
    return "take out what patches torch.cuda, and let xamp.device() name the device"


def fast_on_nvidia(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """Dtypes that an NVIDIA GPU runs faster than fp32."""
    if compute_capability >= (8, 0):
        return ("bfloat16", "float16")
    return ("float16",) if compute_capability >= (7, 0) or compute_capability in _NVIDIA_WITH_FP16 else ()


def fast_on_amd(architecture: str) -> tuple[str, ...]:
    """Dtypes that an AMD GPU, such as ``"gfx90a:sramecc+:xnack-"``, runs faster than fp32."""
    if architecture.startswith(_AMD_WITH_BF16):
        return ("bfloat16", "float16")
    return () if architecture.startswith(_AMD_WITHOUT_FP16) else ("float16",)


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    # Even selecting the current device would call the driver, hence the null context.
    index: int | None = None if device is None else device.index
    if index is None or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def _driver_version() -> str:
    """The kernel driver's version, if Linux shows it in a file; empty otherwise."""
    for path, pattern in (
        ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        with contextlib.suppress(OSError):
            match = re.search(pattern, Path(path).read_text(errors="replace"))
            if match is not None:
                return match[1]
    return ""


def _tf32_settings() -> Iterator[Setting]:
    if fp32.PRODUCTS.narrow():
        yield Setting(
            "torch.backends.cuda.matmul.allow_tf32",
            "True",
            f"float32 matrix products are computed in TF32 ({_TF32}), at every level",
            "torch.backends.cuda.matmul.allow_tf32 = False, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE not set",
            narrows_fp32=True,
            exact=fp32.PRODUCTS.make_exact,
        )
    if fp32.CONVOLUTIONS.narrow():
        yield Setting(
            "torch.backends.cudnn.allow_tf32",
            "True",
            f"float32 convolutions and RNNs are computed in TF32 ({_TF32}), at every level; torch's default",
            "torch.backends.cudnn.allow_tf32 = False",
            expected=True,
            exact=fp32.CONVOLUTIONS.make_exact,
        )


# The switch, whether torch turns it on by default, its effect when it is on.
_SWITCHES = (
    (
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        True,
        "float16 products may add up partial sums in float16; torch's default",
    ),
    (
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        True,
        "bfloat16 products may add up partial sums in bfloat16; torch's default",
    ),
    (
        "backends.cuda.matmul.allow_fp16_accumulation",
        False,
        "float16 products add up in float16: faster, less exact, and sums above 65504 overflow",
    ),
)
_FREEDOMS = (
    ("backends.cudnn.benchmark", "cuDNN picks the fastest algorithm by trial: rounding may differ from run to run"),
    ("backends.cudnn.deterministic", "cuDNN uses deterministic algorithms only, often slower ones"),
)
# By name: values without an effect, the effect of other values, whether it is only a note.
_VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": (
        "0",
        f"NVIDIA's libraries compute float32 in TF32 ({_TF32}), whatever the program says",
        False,
    ),
    "CUBLAS_WORKSPACE_CONFIG": ("", _DETERMINISM, True),
}
_NARROWING = ("NVIDIA_TF32_OVERRIDE", "HIPBLASLT_ALLOW_TF32")
_HIP_VARIABLES = {"HIPBLASLT_ALLOW_TF32": ("0", f"float32 products may be computed in TF32 ({_TF32})", False)}


def _switch_settings() -> Iterator[Setting]:
    for path, default, effect in _SWITCHES:
        if _switched_on(path):
            yield Setting(f"torch.{path}", "True", effect, f"torch.{path} = False", expected=default)
    for path, effect in _FREEDOMS:
        if _switched_on(path):
            yield Setting(f"torch.{path}", "True", effect, f"torch.{path} = False", expected=True)


def _variable_settings(hip: bool) -> Iterator[Setting]:
    yield from environment_settings(_HIP_VARIABLES if hip else _VARIABLES, narrowing=_NARROWING)


def _switched_on(path: str) -> bool:
    """Whether the switch ``torch.<path>`` is on; False if this torch lacks it or refuses to read it."""
    try:
        return operator.attrgetter(path)(torch) is True
    except (AttributeError, RuntimeError, Warning):  # torch refuses if both its old and its new name were set
        return False
