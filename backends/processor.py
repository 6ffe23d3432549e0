"""The processor: what it is called, and whether it computes in bf16."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["arm_lists_bf16", "has_native_bf16", "processor_name"]


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
