"""What names of torch.cuda come to on a device with one index and one queue of work, such as a CPU.

An accelerator whose module in torch lacks one of these names gets it from here too, where that cannot be wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from xamp.accel.use import Device, check_device, count, in_use, missing
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

# Right only where there is one index.
INDEX_NAMES = ("can_device_access_peer", "current_device", "device", "device_of", "set_device")


class device:
    """A block in which that device is the current one. It always is, with one index.

    Args:
        device: as torch.cuda takes it.

    Raises:
        PolicyError: it is not of the type in use.
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
    """Check ``device``; it is the current one already."""
    check_device("set_device", device)


def current_device() -> int:
    """0, the one index."""
    return 0


def device_count() -> int:
    """How many devices the backend names."""
    return len(in_use().backend.devices())


def is_current_stream_capturing() -> bool:
    """False: there are no graphs to capture."""
    return False


def init() -> None:
    """Nothing: the probe has used the device."""


def is_initialized() -> bool:
    """True: the probe has used the device."""
    return True


def get_device_name(device: Device = None) -> str:
    """What the backend calls the device."""
    index, used = check_device("get_device_name", device), in_use()
    if index is None and hasattr(used.runtime, "current_device"):
        index = int(used.runtime.current_device())
    return used.backend.devices()[0 if used.device_type == HOST else index or 0]


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """(0, 0): no CUDA compute capability."""
    return 0, 0


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """False: there is no other device."""
    return False


def get_arch_list() -> list[str]:
    """Empty: torch was built for no chips of this kind in particular."""
    return []


def get_gencode_flags() -> str:
    """Empty, see :func:`get_arch_list`."""
    return ""


def is_tf32_supported() -> bool:
    """False: TF32 is a format of CUDA devices."""
    return False


def empty_cache() -> None:
    """Nothing: there is no cache of memory."""


def ipc_collect() -> None:
    """Nothing: no memory of the device is shared between processes."""


def manual_seed_all(seed: int) -> None:
    """Seed the generator of the one device."""
    _of_one("manual_seed_all", "manual_seed")(seed)


def seed_all() -> None:
    """Seed the generator of the one device at random."""
    _of_one("seed_all", "seed")()


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the generator of the one device."""
    return [_of_one("get_rng_state_all", "get_rng_state")()]


def set_rng_state_all(new_states: Any) -> None:
    """Set the state of the generator of the one device, from a list of one."""
    (state,) = new_states
    _of_one("set_rng_state_all", "set_rng_state")(state)


def _of_one(name: str, single: str) -> Any:
    found = getattr(in_use().runtime, single, None)
    if found is None or count() != 1:
        raise missing(name)
    return found
