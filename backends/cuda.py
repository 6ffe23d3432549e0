"""GPUs that torch calls ``cuda``: NVIDIA's, and AMD's through ROCm."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xamp.backends.native import ModuleBackend
from xamp.errors import BackendUnavailable

__all__ = ["CudaBackend"]

_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_INSTALL = "install a CUDA or ROCm build of torch, chosen at https://pytorch.org/get-started/locally"
# Of AMD's architectures, those with matrix instructions for bf16; the others emulate it.
_AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_AMD_WITHOUT_FP16 = ("gfx7", "gfx80")
# Of NVIDIA's before 7.0, those that compute fp16 at twice the rate of fp32; 6.1 does at a 64th.
_NVIDIA_WITH_FP16 = ((5, 3), (6, 0), (6, 2))
# What torch.cuda.init() says (a part of it, the same from torch 2.6 to 2.13), the cause, the cure.
_CAUSES = (
    (
        "Found no NVIDIA driver",
        "there is no NVIDIA driver",
        "install the driver, see https://www.nvidia.com/drivers; in a container start it with the GPUs (--gpus all)",
    ),
    (
        "driver on your system is too old",
        "the NVIDIA driver is too old for this build of torch, {build}",
        "update the driver, or install a build of torch for an older CUDA, see https://pytorch.org/get-started",
    ),
    (
        "forked subprocess",
        "a process that was forked after the GPU was in use cannot use it",
        'start processes with multiprocessing.set_start_method("spawn")',
    ),
    (
        "driver initialization failed",
        "the GPU driver does not start",
        "run nvidia-smi: where it fails too, reload or reinstall the driver, or restart the machine",
    ),
)


class CudaBackend(ModuleBackend):
    """NVIDIA and AMD GPUs, by torch.autocast("cuda") and scaling on the device."""

    fused_optimizers = ("SGD", "Adam", "AdamW", "Adagrad")
    process_group = "nccl"

    def require_device(self) -> None:
        """See :meth:`xamp.backends.native.NativeBackend.require_device`."""
        if torch.version.cuda is None and torch.version.hip is None:
            raise BackendUnavailable(f"this torch ({torch.__version__}) is built without CUDA and ROCm\n{_INSTALL}")
        try:
            self.module.init()  # is_available() would swallow the reason
        except Exception as error:
            raise BackendUnavailable("\n".join(explain(str(error), os.environ))) from error

    def dtypes(self, device: torch.device | None = None) -> tuple[str, ...]:
        """fp16 on all of them, bf16 where the GPU computes in it rather than emulate it."""
        with _current(device):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("float16", "bfloat16") if has_bf16 else ("float16",)

    def fast_dtypes_of(self, device: torch.device | None = None) -> tuple[str, ...]:
        """Those that the GPU computes in at a higher rate than fp32, bf16 first."""
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return fast_on_amd(str(getattr(properties, "gcnArchName", "")))
        return fast_on_nvidia((properties.major, properties.minor))

    def versions(self) -> Mapping[str, str]:
        """See :meth:`xamp.contract.Backend.versions`: torch, CUDA or HIP, cuDNN or MIOpen, and the driver."""
        hip = torch.version.hip
        found = {"torch": torch.__version__, **({"hip": hip} if hip else {"cuda": str(torch.version.cuda)})}
        cudnn: Any = torch.backends.cudnn  # has no types
        if cudnn.is_available():
            found["miopen" if hip else "cudnn"] = str(cudnn.version())
        driver = _driver_version()
        return {**found, "driver": driver} if driver else found


def explain(message: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Cause and cure behind what ``torch.cuda.init()`` raised.

    Args:
        message: the text of its error.
        environment: the process's environment variables; those that mask GPUs matter where none is left.
    """
    for part, cause, cure in _CAUSES:
        if part in message:
            return cause.format(build=torch.__version__), cure
    if re.search(r"No (CUDA|HIP) GPUs are available", message):
        masks = [f"{name}={environment[name]!r}" for name in _MASKS if name in environment]
        if masks:
            return (
                f"no GPU is visible under {' '.join(masks)}",
                f"unset {masks[0].partition('=')[0]}, or name GPUs in it",
            )
        return "the driver finds no GPU", "check that the machine has one and that nvidia-smi or rocm-smi lists it"
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    return f"torch.cuda.init() failed: {first}", "run nvidia-smi or rocm-smi, and `python -m torch.utils.collect_env`"


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
    # Selecting a device that is current already would still touch the driver, hence the null context.
    index: int | None = None if device is None else device.index
    if index is None or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def _driver_version() -> str:
    """The kernel driver's version, where Linux shows it without asking the driver."""
    for path, pattern in (
        ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        with contextlib.suppress(OSError):
            match = re.search(pattern, Path(path).read_text(errors="replace"))
            if match is not None:
                return match[1]
    return ""
