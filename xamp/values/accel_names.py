"""Names of an accelerator's module of torch that ``xamp.accel`` has too, by kind. Nothing is imported here.

``xamp.accel`` exports them, ``xamp run`` redirects them, and ``xamp port`` rewrites them.
"""

from __future__ import annotations

__all__ = ["CLASSES", "DEVICES", "MEMORY", "NVTX", "OLD", "RANDOM", "STREAMS"]

DEVICES = ("set_device", "current_device", "synchronize", "ipc_collect", "init", "get_device_name")
"""Which device, and waiting for it."""

STREAMS = ("stream", "current_stream", "default_stream", "set_stream", "is_current_stream_capturing")

CLASSES = ("Stream", "Event", "StreamContext", "device", "device_of")

OLD = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"}
"""Names of torch's that have another one today."""

MEMORY = (
    "empty_cache",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)

RANDOM = (
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)

NVTX = ("mark", "range", "range_end", "range_pop", "range_push", "range_start")
