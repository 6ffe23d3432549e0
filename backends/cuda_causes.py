"""How NVIDIA and AMD GPUs fail, as data: the message of torch or the driver, its cause, and the cure.

This is apart from :mod:`xamp.backends.cuda` because it must also be importable where torch is not.
"""

from __future__ import annotations

from xamp.contract import Cause

__all__ = ["CAUSES"]

_LIBRARIES = "cudart|cublas|cublasLt|cudnn|cufft|cufile|curand|cusparse|cusparseLt|cusolver|cupti|nccl|nvrtc|nvJitLink"
_DRIVERS = "https://www.nvidia.com/drivers"
_BUILDS = "https://pytorch.org/get-started/locally"

# Each pattern is a part of a message that is the same from torch 2.6 to 2.13.
CAUSES = (
    Cause(
        "Found no NVIDIA driver",
        "there is no NVIDIA driver",
        f"install the driver, see {_DRIVERS}; in a container start it with the GPUs (--gpus all)",
    ),
    Cause(
        # 11040 is CUDA 11.4, 12100 is 12.10.
        r"driver on your system is too old \(found version (\d\d)0?(\d{1,2})\d\)",
        r"the NVIDIA driver is too old for this build of torch: it supports CUDA up to \1.\2",
        f"update the driver, see {_DRIVERS}, or install a build of torch for an older CUDA, see {_BUILDS}",
    ),
    Cause(
        r"Cannot re-initialize (?:CUDA|HIP) in forked subprocess",
        "a process that was forked after the GPU was in use cannot use it",
        'start processes with multiprocessing.set_start_method("spawn")',
    ),
    Cause(
        "driver initialization failed",
        "the GPU driver does not start",
        "run nvidia-smi: where it fails too, reload or reinstall the driver, or restart the machine",
    ),
    Cause(
        "No (?:CUDA|HIP) GPUs are available",
        "the driver finds no GPU",
        "check that the machine has one and that nvidia-smi or rocm-smi lists it",
        masked=True,
    ),
    Cause(
        "Error 80[23]: system (?:not yet initialized|has unsupported display driver)",
        "the driver's parts do not fit together or have not all started",
        "restart the machine after an update of the driver; where NVSwitch joins the GPUs, start nvidia-fabricmanager",
    ),
    Cause(
        "Error 804: forward compatibility was attempted",
        "the CUDA libraries in front of the driver's (a container's, mostly) are newer than this GPU's driver allows",
        "update the driver of the host, or use an image or a build of torch for an older CUDA",
    ),
    Cause(
        "no kernel image is available|invalid device function",
        "this build of torch has no kernels for this GPU: it is newer or older than those the build was made for",
        f"install a build of torch made for it, see {_BUILDS}; torch.cuda.get_arch_list() shows what this one has",
    ),
    Cause(
        r"(?:CUDA|HIP) (?:error: )?out of memory",
        "the GPU's memory is in use, by other processes or by this one",
        "see nvidia-smi or rocm-smi for who uses it, or choose another GPU by CUDA_VISIBLE_DEVICES",
    ),
    Cause(
        rf"(lib(?:{_LIBRARIES})\.so[.\d]*): cannot open shared object file",
        r"this is a CUDA build of torch, and its CUDA library \1 is not found",
        r"reinstall torch with what it depends on (pip install --force-reinstall torch), or put the folder of \1 on "
        "LD_LIBRARY_PATH",
        during=("torch",),
    ),
)
