"""``torch.abacus``: what torch.cuda is on other machines. All work is done when a call returns."""

from __future__ import annotations

from typing import Any

import torch

from xamp_abacus import kernels
from xamp_abacus.memory import device_type, is_here

Event = torch.Event
Stream = torch.Stream


def is_available() -> bool:
    """It is, wherever this is installed."""
    return True


def is_initialized() -> bool:
    """Nothing needs to be."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """See :data:`xamp_abacus.memory.device_type`."""
    return 1


def current_device() -> int:
    """The one index."""
    return 0


def set_device(device: Any) -> None:
    """Check that it is this one."""
    is_here(torch.device(device_type(), device) if isinstance(device, int) else device)


class device:
    """A block in which that device is the current one."""

    def __init__(self, device: Any) -> None:
        set_device(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


def get_device_name(device: Any = None) -> str:
    """What it is called."""
    return "Abacus"


def synchronize(device: Any = None) -> None:
    """Nothing to wait for."""


def current_stream(device: Any = None) -> torch.Stream:
    """The one queue."""
    return torch.accelerator.current_stream()


def stream(stream: torch.Stream) -> torch.Stream:
    """A block in which that stream is the current one."""
    return stream


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast may lower to."""
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    """Seed the device."""
    kernels.generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Of the device; bytes on the CPU."""
    return kernels.generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """What :func:`get_rng_state` gave."""
    kernels.generator.set_state(new_state)
