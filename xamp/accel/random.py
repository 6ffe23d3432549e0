"""``xamp.accel.random``: the names of torch.cuda.random, for the random generator of the device in use.

On a CPU that is torch's default generator, the one of ``torch.manual_seed``. Seeding, saving and restoring one is the
same as seeding, saving and restoring the other. A script that seeds both with one seed draws the same numbers as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from xamp.accel.dispatch import call, call_on
from xamp.accel.used_device import Device, in_use
from xamp.registry.registry import HOST
from xamp.values.accel_names import RANDOM

__all__ = ["fork_rng", *RANDOM]


@contextlib.contextmanager
def fork_rng(
    devices: Iterable[Device] | None = None, enabled: bool = True, *, device_type: str | None = None
) -> Iterator[None]:
    """A block after which the random states are those from before it, as ``torch.random.fork_rng``.

    The states are torch's own and, on an accelerator, those of ``devices``. On a CPU there is one, whatever ``devices``
    names.

    Args:
        devices: of the type in use; None: all.
        enabled: False does nothing.
        device_type: another type than the one in use.
    """
    used = in_use().device_type if device_type is None else device_type
    if used == HOST:
        with torch.random.fork_rng(devices=(), enabled=enabled):
            yield
        return
    with torch.random.fork_rng(devices, enabled, device_type=used):
        yield


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    call("manual_seed", seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices of the type in use with the same seed."""
    call("manual_seed_all", seed)


def seed() -> None:
    """Seed the generator of the current device at random."""
    call("seed")


def seed_all() -> None:
    """Seed the generators of all devices of the type in use at random."""
    call("seed_all")


def initial_seed() -> int:
    """Return the seed of the generator of the current device."""
    return int(call("initial_seed"))


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of a device's generator.

    Returns:
        A uint8 tensor on the CPU. Its length depends on the device type, so it fits no other type.
    """
    state: torch.Tensor = call_on("get_rng_state", device)
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators, in index order; see :func:`get_rng_state`."""
    states: list[torch.Tensor] = call("get_rng_state_all")
    return states


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator to a state from :func:`get_rng_state`.

    Raises:
        CheckpointError: on a CPU, the state is from another type of device.
    """
    call_on("set_rng_state", device, new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators to the states from :func:`get_rng_state_all`.

    Raises:
        CheckpointError: as :func:`set_rng_state`, or the states are from several devices.
    """
    call("set_rng_state_all", new_states)
