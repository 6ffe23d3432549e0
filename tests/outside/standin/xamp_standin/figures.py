"""What ``torch.standin`` says of the device and of its memory, which is that of the process."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

from xamp_standin.facts import facts

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def get_device_name(device: Any = None) -> str:
    """What it stands for."""
    return f"stand-in for {facts().about['card']}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Of a device that computes in bf16, or of one that does not."""
    return (9, 0) if is_bf16_supported() else (7, 0)


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Name, memory in bytes and processors."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return types.SimpleNamespace(name=get_device_name(), total_memory=memory, multi_processor_count=os.cpu_count() or 1)


def is_bf16_supported() -> bool:
    """Whether it computes in bf16."""
    return "bfloat16" in facts().dtypes


def memory_allocated(device: Any = None) -> int:
    """Bytes that the process has now."""
    return _bytes("VmRSS")


def max_memory_allocated(device: Any = None) -> int:
    """Bytes that it had at most."""
    return _bytes("VmHWM")


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peak begin here."""
    _CLEAR.write_text("5", encoding="ascii")


def memory_stats(device: Any = None) -> dict[str, int]:
    """Those that are asked for most."""
    return {"allocated_bytes.all.current": memory_allocated(), "allocated_bytes.all.peak": max_memory_allocated()}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The same, to read."""
    return f"{memory_allocated()} bytes, at most {max_memory_allocated()}"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and all."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def empty_cache() -> None:
    """Nothing is kept."""


def _bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
