"""``xamp.accel.memory``: the memory functions of torch.cuda, in bytes.

On a CPU the figures are those of the process: its resident set, now and at its peak. They include memory that torch did
not allocate.
"""

from __future__ import annotations

from typing import Any

from xamp.accel.dispatch import attribute, call, call_on, find, takes_indices
from xamp.accel.used_device import Device, check_device
from xamp.values.accel_names import MEMORY

__all__ = [*MEMORY]


def empty_cache() -> None:
    """Return unused memory to the device's driver; nothing on a CPU."""
    call("empty_cache")


def memory_allocated(device: Device = None) -> int:
    """Return the bytes that tensors occupy; on a CPU, the resident set of the process."""
    return int(call_on("memory_allocated", device))


def max_memory_allocated(device: Device = None) -> int:
    """Return the peak of :func:`memory_allocated` since the start or :func:`reset_peak_memory_stats`, in bytes."""
    return int(call_on("max_memory_allocated", device))


def memory_reserved(device: Device = None) -> int:
    """Return the bytes that torch's allocator holds, used or not; on a CPU, the resident set of the process."""
    return int(call_on("memory_reserved", device))


def max_memory_reserved(device: Device = None) -> int:
    """Return the peak of :func:`memory_reserved` since the start or :func:`reset_peak_memory_stats`, in bytes."""
    return int(call_on("max_memory_reserved", device))


def memory_cached(device: Device = None) -> int:
    """The old name of :func:`memory_reserved`."""
    return memory_reserved(device)


def max_memory_cached(device: Device = None) -> int:
    """The old name of :func:`max_memory_reserved`."""
    return max_memory_reserved(device)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset both peaks; on a CPU, this works only on Linux, as far as the system allows."""
    call_on("reset_peak_memory_stats", device)


def reset_max_memory_allocated(device: Device = None) -> None:
    """The old name of :func:`reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: Device = None) -> None:
    """Another old name of :func:`reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Reset the counts in :func:`memory_stats`; a CPU keeps none."""
    call_on("reset_accumulated_memory_stats", device)


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return the figures of torch's allocator, by name; on a CPU, only the four that are known, under these names."""
    found: dict[str, Any] = call_on("memory_stats", device)
    return found


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return a summary of the memory figures as text."""
    check_device("memory_summary", device)
    native = find("memory_summary")
    if native is None:
        return _summary(device)
    place: Device = device if takes_indices() else None
    return str(native(place, abbreviated))


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> Any:
    """Return the allocator's segments; a CPU has none.

    Args:
        mempool_id: passed on if it is not None.
        include_traces: passed on if it is not True.
    """
    if include_traces:
        return call("memory_snapshot", *(() if mempool_id is None else (mempool_id,)))
    return call("memory_snapshot", mempool_id, include_traces)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free bytes and the total bytes; on a CPU, those of the machine, or of the container if it has less.

    Raises:
        UnsupportedPolicy: the system does not report them.
    """
    free, total = call_on("mem_get_info", device)
    return int(free), int(total)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit torch's allocator to a fraction, 0 to 1, of the device's memory; on a CPU there is no limit.

    Raises:
        PolicyError: on a CPU, ``fraction`` is not a number from 0 to 1.
    """
    call_on("set_per_process_memory_fraction", device, fraction)


def _summary(device: Device) -> str:
    rows = [("in use", memory_allocated, max_memory_allocated), ("held", memory_reserved, max_memory_reserved)]
    lines = [f"{'MiB':8} {'now':>12} {'peak':>12}"]
    lines += [f"{name:8} {now(device) / 2**20:12.1f} {peak(device) / 2**20:12.1f}" for name, now, peak in rows]
    return "\n".join(lines)


def __getattr__(name: str) -> Any:
    return attribute(name, __all__, "memory")
