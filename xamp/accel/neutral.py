"""Neutral answers: functions of torch.cuda for a device with one index and one queue of work, such as a CPU.

If the torch module of an accelerator lacks one of these names, it also comes from here, where that cannot be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.accel.used_device import Device, check_device, count, in_use, missing
from xamp.registry.registry import HOST

__all__ = [
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_gencode_flags",
    "get_rng_state_all",
    "init",
    "ipc_collect",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed_all",
    "seed_all",
    "set_device",
    "set_rng_state_all",
]

# These answers are right only on a device with one index.
INDEX_NAMES = ("can_device_access_peer", "current_device", "device", "device_of", "set_device")


class device:
    """A block in which that device is the current one. With one index, it always is.

    Args:
        device: a device as torch.cuda takes it.

    Raises:
        PolicyError: ``device`` is not of the type in use.
    """

    def __init__(self, device: Device) -> None:
        check_device("device", device)
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class device_of(device):
    """A block in which the device of ``obj``, a tensor or a storage, is the current one. It always is."""

    def __init__(self, obj: Any) -> None:
        super().__init__(None)


def set_device(device: Device) -> None:
    """Check ``device``; it is the current device already."""
    check_device("set_device", device)


def device_count() -> int:
    """Return the number of devices that the backend lists."""
    return len(in_use().backend.devices())


def get_device_name(device: Device = None) -> str:
    """Return the backend's name for the device."""
    index, used = check_device("get_device_name", device), in_use()
    if index is None and hasattr(used.runtime, "current_device"):
        index = int(used.runtime.current_device())
    return used.backend.devices()[0 if used.device_type == HOST else index or 0]


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


current_device = _always(0)  # the only index
can_device_access_peer = _always(False)  # there is no other device
is_current_stream_capturing = _always(False)  # there are no graphs to capture
get_device_capability = _always((0, 0))  # it has no CUDA compute capability
is_tf32_supported = _always(False)  # a format of CUDA devices
get_arch_list, get_gencode_flags = _always([]), _always("")  # torch was not built for particular chips of this type
init, is_initialized = _always(None), _always(True)  # the probe has initialized the device
empty_cache = _always(None)  # there is no cache of memory
ipc_collect = _always(None)  # processes share no memory of the device


def manual_seed_all(seed: int) -> None:
    """Seed the generator of the one device."""
    _single_device_function("manual_seed_all", "manual_seed")(seed)


def seed_all() -> None:
    """Seed the generator of the one device at random."""
    _single_device_function("seed_all", "seed")()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of the generator of the one device, in a list."""
    return [_single_device_function("get_rng_state_all", "get_rng_state")()]


def set_rng_state_all(new_states: Any) -> None:
    """Set the state of the generator of the one device, from a list with one state."""
    (state,) = new_states
    _single_device_function("set_rng_state_all", "set_rng_state")(state)


def _single_device_function(name: str, single: str) -> Any:
    found = getattr(in_use().runtime, single, None)
    if found is None or count() != 1:
        raise missing(name)
    return found
