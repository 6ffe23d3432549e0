"""``xamp.accel`` on a CPU: torch.cuda's names, for the processor, its memory and torch's random generator.

Names that are not here mean the same on every device with one index and one queue, and ``xamp.accel`` has them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from xamp.backends import host_memory
from xamp.backends.processor import processor_name
from xamp.errors import CheckpointError, PolicyError

__all__ = [
    "HostProperties",
    "default_generators",
    "device_count",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
]

Device: TypeAlias = torch.device | str | int | None

default_generators = (torch.default_generator,)
# Tensor types that old scripts call, and compare types with.
BFloat16Tensor, BoolTensor, ByteTensor, CharTensor = (
    torch.BFloat16Tensor,
    torch.BoolTensor,
    torch.ByteTensor,
    torch.CharTensor,
)
DoubleTensor, FloatTensor, HalfTensor = torch.DoubleTensor, torch.FloatTensor, torch.HalfTensor
IntTensor, LongTensor, ShortTensor = torch.IntTensor, torch.LongTensor, torch.ShortTensor


@dataclasses.dataclass(frozen=True)
class HostProperties:
    """The result of ``get_device_properties`` on a CPU.

    Attributes:
        name: the processor's name.
        total_memory: memory of the machine or the container, in bytes.
        multi_processor_count: processors that this process may run on.
        major: 0, because a CPU has no CUDA compute capability.
        minor: 0, as ``major``.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def is_available() -> bool:
    """False, because the question is for an accelerator."""
    return False


def device_count() -> int:
    """1, however many sockets there are. With 0, a script that takes its rank modulo this number would fail."""
    return 1


def synchronize(device: Device = None) -> None:
    """Does nothing, because a CPU's work is done when the call returns."""


def get_device_properties(device: Device = None) -> HostProperties:
    """See :class:`HostProperties`."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return HostProperties(processor_name(), host_memory.total(), processors)


# --- torch's default generator


def manual_seed(seed: int) -> None:
    """Seed torch's CPU generator only; ``torch.manual_seed`` would also seed accelerators."""
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """See :func:`manual_seed`."""
    manual_seed(seed)


def seed() -> None:
    """Seed torch's CPU generator with a random number."""
    torch.default_generator.seed()


def seed_all() -> None:
    """See :func:`seed`."""
    seed()


def initial_seed() -> int:
    """The seed of torch's CPU generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state of torch's CPU generator: uint8, 5056 bytes."""
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of torch's CPU generator, in a list of one."""
    return [get_rng_state()]


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of torch's CPU generator.

    Raises:
        CheckpointError: ``new_state`` is from another kind of device.
    """
    has, own = new_state.numel(), get_rng_state().numel()
    if new_state.dtype != torch.uint8 or has != own:
        raise CheckpointError(
            f"accel.set_rng_state(new_state): new_state has {has} elements of {new_state.dtype}, a state of the CPU's "
            f"generator {own} of torch.uint8: it was taken on another kind of device, and fits no other. "
            "Leave it out, and seed afresh: xamp.accel.manual_seed_all(seed)."
        )
    torch.default_generator.set_state(new_state.detach().cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of torch's CPU generator from a list of one state; an empty list changes nothing.

    Raises:
        CheckpointError: there are several states, or the state is from another kind of device.
    """
    states = list(new_states)
    if len(states) > 1:
        raise CheckpointError(
            f"accel.set_rng_state_all(new_states): these are the states of {len(states)} devices, and a CPU has one "
            "generator. Leave them out, and seed afresh: xamp.accel.manual_seed_all(seed)."
        )
    for state in states:
        set_rng_state(state)


# --- memory of the process, in bytes


def memory_allocated(device: Device = None) -> int:
    """The resident set."""
    return host_memory.resident()


def memory_reserved(device: Device = None) -> int:
    """The resident set, because the process reserves nothing beyond it."""
    return host_memory.resident()


def max_memory_allocated(device: Device = None) -> int:
    """The highest resident set since the start or the last reset."""
    return host_memory.peak()


def max_memory_reserved(device: Device = None) -> int:
    """The highest resident set since the start or the last reset."""
    return host_memory.peak()


def reset_peak_memory_stats(device: Device = None) -> None:
    """Restart the peak, if the system supports that."""
    host_memory.reset_peak()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Does nothing, because no counts are kept."""


def memory_stats(device: Device = None) -> dict[str, Any]:
    """The four available figures, under torch.cuda's names."""
    both = {"all.current": host_memory.resident(), "all.peak": host_memory.peak()}
    return {f"{kind}_bytes.{name}": value for kind in ("allocated", "reserved") for name, value in both.items()}


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """An empty list, because torch's CPU allocator keeps no segments."""
    return []


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total memory of the machine or the container.

    Raises:
        UnsupportedPolicy: the system does not report it.
    """
    return host_memory.free(), host_memory.total()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Only check ``fraction``, because torch cannot limit a CPU's memory.

    Raises:
        PolicyError: ``fraction`` is not a number from 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise PolicyError(
            f"accel.set_per_process_memory_fraction({fraction!r}): must be a number from 0.0 to 1.0, such as 0.5."
        )
