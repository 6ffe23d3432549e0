"""``xamp.accel``: the names of torch.cuda, on the device in use, so that a script is ported by renaming.

The device in use is :func:`xamp.device`: the device that ``XAMP_DEVICE`` names, else the best accelerator that works,
else the CPU. Names, arguments and results are those of torch.cuda. The docstring of each function says what it does on
a CPU. If the torch module of an accelerator lacks a name, ``xamp.accel`` gives a neutral answer where that cannot be
wrong (``Stream`` on a device with one queue of work); otherwise a use of the name raises ``UnsupportedPolicy``. A name
that is not listed here is looked up in the device's own module (``CUDAGraph``).

These are classes of the device in use. They can be instantiated, subclassed and used with ``isinstance``::

    Stream, Event, StreamContext   queues of work and points in them; a CPU does all work in order, at once
    device(index), device_of(obj)  blocks in which that device is the current one; on a CPU it always is

These are names of torch itself that only some devices take::

    channels_last, channels_last_3d    memory formats; on a device without them, torch.contiguous_format
    set_default_tensor_type(t)         also with a type of the device in use
    pin_memory(tensor)                 on a CPU, the tensor itself
    random.fork_rng(devices)           of the device in use

A device is an index, a ``torch.device``, a string, or None for the current one. A device of another type raises
``PolicyError``, an absent one ``BackendUnavailable``. On a CPU every index means the one device. If ``XAMP_DEVICE`` has
an index, the first use makes that device torch's current one.

Modules: ``xamp.accel``, the names of torch.cuda. ``use`` finds the device and ``dispatch`` the function; ``neutral``
and ``streams`` have functions for a device with one index and one queue; ``memory``, ``random`` and ``nvtx`` are
parts of the interface.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from xamp.accel import memory, nvtx, random
from xamp.accel.defaults import FORMATS, memory_format
from xamp.accel.defaults import pin_memory as pin_memory
from xamp.accel.defaults import set_default_tensor_type as set_default_tensor_type
from xamp.accel.dispatch import attribute, call, call_on
from xamp.accel.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from xamp.accel.random import fork_rng as fork_rng
from xamp.accel.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from xamp.accel.used_device import Device, check_device, in_use
from xamp.registry.device_in_use import is_available
from xamp.values.log import say

if TYPE_CHECKING:  # at run time __getattr__ returns the classes of the device in use
    from types import ModuleType

    from xamp.accel.neutral import device, device_of
    from xamp.accel.streams import Event, Stream, StreamContext

    amp: ModuleType
    channels_last: torch.memory_format
    channels_last_3d: torch.memory_format

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "amp",
    "can_device_access_peer",
    "cudart",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "nvtx",
    "random",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]
# Names of torch.cuda. Those of torch itself that this module has too stand here.
_OF_TORCH = (*FORMATS, "fork_rng", "pin_memory", "set_default_tensor_type")

OutOfMemoryError = torch.OutOfMemoryError


def device_count() -> int:
    """Return the number of devices of the type in use; 1 on a CPU, so that scripts can take a rank modulo this."""
    return int(call("device_count"))


def current_device() -> int:
    """Return the index of the current device; 0 on a CPU."""
    return int(call("current_device"))


def set_device(device: Device) -> None:
    """Make ``device`` the current one; on a CPU, only check that it is a device.

    None and a device without an index mean the current device and change nothing.
    """
    if check_device("set_device", device) is not None:
        call("set_device", device)


def synchronize(device: Device = None) -> None:
    """Wait for all work given to ``device``; on a CPU, all work is done already."""
    call_on("synchronize", device)


def init() -> None:
    """Initialize the device; a CPU needs no initialization."""
    call("init")


def is_initialized() -> bool:
    """Tell whether the device is initialized; a CPU always is."""
    return bool(call("is_initialized"))


def get_device_name(device: Device = None) -> str:
    """Return the name of the device; on a CPU, the name of the processor."""
    return str(call_on("get_device_name", device))


def get_device_properties(device: Device = None) -> Any:
    """Return an object with ``name``, ``total_memory`` in bytes, ``multi_processor_count``, and more on some devices.

    On a CPU, the memory is that of the machine or of the container, the processors are those on which this process may
    run, and ``major`` and ``minor`` are 0.
    """
    return call_on("get_device_properties", device)


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return the CUDA compute capability; (0, 0) on devices without one, so that tests for a feature fail there.

    It is logged once that (0, 0) stands for none, where an accelerator has none. What the device can do is told by
    ``xamp.available_backends()`` and by :func:`is_bf16_supported`.
    """
    found = call_on("get_device_capability", device)
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return int(found[0]), int(found[1])
    _tell_no_capability(in_use().device_type)
    return 0, 0  # other devices return a dict or None


@functools.cache
def _tell_no_capability(device_type: str) -> None:
    say(
        "accel.get_device_capability(): %s has no CUDA compute capability; (0, 0) stands for none. Ask "
        "accel.is_bf16_supported(), or `xamp doctor` for what the device can do",
        device_type,
    )


def get_arch_list() -> list[str]:
    """Return the chips that torch was built for; empty on a CPU."""
    return list(call("get_arch_list"))


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Tell whether ``device`` can access the memory of ``peer_device``; False on a CPU, which has no peer."""
    check_device("can_device_access_peer", device)
    check_device("can_device_access_peer", peer_device)
    return bool(call("can_device_access_peer", device, peer_device))


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Tell whether the device computes in bf16, as its backend declares.

    Args:
        including_emulation: False asks whether the hardware computes in bf16 natively.
    """
    declared = in_use().backend.capabilities()
    return "bfloat16" in (declared.dtypes if including_emulation else declared.fast_dtypes)


def is_tf32_supported() -> bool:
    """Tell whether the device computes in TF32; False on a CPU."""
    return bool(call("is_tf32_supported"))


def ipc_collect() -> None:
    """Free the memory that other processes of the machine have released; nothing on a CPU."""
    call("ipc_collect")


def cudart() -> Any:
    """Return the interface of the CUDA runtime.

    Raises:
        UnsupportedPolicy: the device has none.
    """
    return call(
        "cudart", instead="To start and stop a profile, use torch.profiler.profile(); to wait, accel.synchronize()."
    )


def stream(stream: Stream | None) -> StreamContext:
    """Return a block in which ``stream`` is the current stream of this thread; None changes nothing."""
    context: StreamContext = call("stream", stream)
    return context


def current_stream(device: Device = None) -> Stream:
    """Return the current stream of this thread; ``tensor.record_stream`` accepts it on a CPU too."""
    found: Stream = call_on("current_stream", device)
    return found


def default_stream(device: Device = None) -> Stream:
    """Return the stream that is current if none was chosen."""
    found: Stream = call_on("default_stream", device)
    return found


def set_stream(stream: Stream) -> None:
    """Make ``stream`` the current stream of this thread until another one is set."""
    call("set_stream", stream)


def is_current_stream_capturing() -> bool:
    """Tell whether a graph is being captured; False on a CPU."""
    return bool(call("is_current_stream_capturing"))


def __getattr__(name: str) -> Any:
    if name == "amp":  # torch.cuda.amp; not imported above, because xamp imports this module
        return sys.modules["xamp"]
    if name in FORMATS:
        return memory_format(name)
    return attribute(name, __all__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_OF_TORCH, *(name for name in globals() if name.startswith("__"))})
