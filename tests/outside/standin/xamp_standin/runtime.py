"""``torch.standin``: what torch.cuda is on other machines."""

from __future__ import annotations

from typing import Any

from xamp_abacus.runtime import current_device as current_device
from xamp_abacus.runtime import device as device
from xamp_abacus.runtime import device_count as device_count
from xamp_abacus.runtime import get_amp_supported_dtype as get_amp_supported_dtype
from xamp_abacus.runtime import get_rng_state as get_rng_state
from xamp_abacus.runtime import is_available as is_available
from xamp_abacus.runtime import is_initialized as is_initialized
from xamp_abacus.runtime import manual_seed as manual_seed
from xamp_abacus.runtime import manual_seed_all as manual_seed_all
from xamp_abacus.runtime import set_device as set_device
from xamp_abacus.runtime import set_rng_state as set_rng_state
from xamp_abacus.runtime import stream as stream

from xamp_standin import queue
from xamp_standin.figures import empty_cache as empty_cache
from xamp_standin.figures import get_device_capability as get_device_capability
from xamp_standin.figures import get_device_name as get_device_name
from xamp_standin.figures import get_device_properties as get_device_properties
from xamp_standin.figures import is_bf16_supported as is_bf16_supported
from xamp_standin.figures import max_memory_allocated as max_memory_allocated
from xamp_standin.figures import max_memory_reserved as max_memory_reserved
from xamp_standin.figures import mem_get_info as mem_get_info
from xamp_standin.figures import memory_allocated as memory_allocated
from xamp_standin.figures import memory_reserved as memory_reserved
from xamp_standin.figures import memory_stats as memory_stats
from xamp_standin.figures import memory_summary as memory_summary
from xamp_standin.figures import reset_peak_memory_stats as reset_peak_memory_stats
from xamp_standin.queue import Event as Event
from xamp_standin.queue import Stream as Stream
from xamp_standin.queue import current_stream as current_stream

default_stream = current_stream


def _is_in_bad_fork() -> bool:
    return queue.forked


def get_sync_debug_mode() -> str:
    """What a wait does."""
    return queue.mode


def set_sync_debug_mode(mode: str) -> None:
    """Choose what a wait does: ``"default"``, ``"warn"`` or ``"error"``.

    Raises:
        RuntimeError: ``mode`` is none of these.
    """
    if mode not in ("default", "warn", "error"):
        raise RuntimeError(f"set_sync_debug_mode({mode!r}): it is one of default, warn, error")
    queue.mode = mode


def synchronize(device: Any = None) -> None:
    """Let the host wait for the device."""
    queue.wait()
