"""Streams and events of a device with one queue of work, such as a CPU.

All work runs in the order in which it was submitted. So a stream never has to wait for another one.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import Any

import torch

from xamp.accel.used_device import Device, check_device, in_use, missing
from xamp.errors import PolicyError, StateError
from xamp.registry.registry import HOST

# A device gets all of these or none: an event of one module cannot be recorded in a stream of another.
__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]

_thread = threading.local()  # .stream: this thread's current stream, if it has chosen one
_defaults: dict[str, Stream] = {}  # by device type
_FIRST_ID = 0x78616D70 << 16  # a stream with this id or a higher one is of this module
_ids = itertools.count(_FIRST_ID)
_recording: set[str] = set()  # device types whose record_stream has been checked
_lock = threading.Lock()


class Stream(torch.Stream):
    """The one queue of the device. All streams of a device are this queue.

    The class derives from ``torch.Stream``, as torch.cuda's does: ``tensor.record_stream`` accepts nothing else.

    Args:
        device: a device as torch.cuda takes it.
        priority: stored, without effect.
        kwargs: the arguments with which torch.cuda.Stream wraps an existing stream; without effect.

    Raises:
        PolicyError: ``device`` is not of the type in use.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Make the stream with a unique id, on device type 0: that is the CPU, which every machine has."""
        return super().__new__(cls, stream_id=next(_ids), device_index=-1, device_type=0)

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        check_device("Stream", device)
        kind = in_use().device_type
        self.priority = priority
        self._device = torch.device(kind) if kind == HOST else torch.device(kind, 0)
        self._contexts: list[StreamContext] = []
        _support_record_stream(kind)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a variable in torch's annotations
        """The device that was in use when the stream was made."""
        return self._device

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        _wait()

    def query(self) -> bool:
        """Wait for all work given to the device, and return True: the work is done then."""
        _wait()
        return True

    def wait_stream(self, stream: torch.Stream) -> None:
        """Do nothing: work that was given to ``stream`` earlier runs earlier."""

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # these events only
        """Do nothing: work that was given before ``event`` runs earlier."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record ``event``, or a new event if it is None, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Return the lowest and the highest priority; there is only one."""
        return 0, 0

    def __enter__(self) -> Stream:
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._contexts.pop().__exit__(*raised)

    def __repr__(self) -> str:
        return f"<xamp.accel.Stream device={self.device}>"


def _support_record_stream(kind: str) -> None:
    """Register ``tensor.record_stream`` for this device type if torch has none; it refuses streams of other modules.

    It has nothing to do: work that is given later uses the tensor's memory later.
    """

    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        if stream.stream_id < _FIRST_ID:
            raise NotImplementedError(f"record_stream on {kind}: torch has no streams there; take xamp.accel's")

    with _lock:
        if kind in _recording:
            return
        try:
            torch.empty(0, device=kind).record_stream(torch.Stream(stream_id=_FIRST_ID, device_index=-1, device_type=0))
        except NotImplementedError:
            torch.library.register_kernel("aten::record_stream", kind, record_stream)
        except RuntimeError:
            pass  # torch has a record_stream here, for streams that its module does not offer
        _recording.add(kind)


class Event:
    """A point in the one queue of the device.

    Args:
        enable_timing: whether :meth:`elapsed_time` can be used; each record then waits for the device.
        blocking: without effect.
        interprocess: without effect.
        external: without effect.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._timing = enable_timing
        self._seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event. A timed event waits for the work given so far and stores the time."""
        if self._timing:
            _wait()
            self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: work that was given before the event runs before work that is given now."""

    def synchronize(self) -> None:
        """Wait for all work given to the device, which includes the work before the event."""
        _wait()

    def query(self) -> bool:
        """Wait for the work before the event, and return True: the work is done then."""
        _wait()
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            StateError: one of the two events is not timed or was not recorded.
        """
        start, end = self._seconds, end_event._seconds
        if start is None or end is None:
            raise StateError(
                "Event.elapsed_time(end_event): both events must be made with Event(enable_timing=True) and recorded "
                f"before; {'this one' if start is None else 'end_event'} was not."
            )
        return (end - start) * 1000.0

    def __repr__(self) -> str:
        return f"<xamp.accel.Event {'timed' if self._timing else 'untimed'}>"


class StreamContext:
    """A block in which ``stream`` is the current stream of this thread. It may be entered again.

    Args:
        stream: a :class:`Stream`; None changes nothing.

    Raises:
        PolicyError: ``stream`` is neither.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = None if stream is None else _checked("stream", stream)
        self._before: list[Stream | None] = []

    def __enter__(self) -> None:
        self._before.append(getattr(_thread, "stream", None))
        if self.stream is not None:
            _thread.stream = self.stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _thread.stream = self._before.pop()


def stream(stream: Stream | None) -> StreamContext:
    """Return a block in which ``stream`` is current; see :class:`StreamContext`."""
    return StreamContext(stream)


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` the current stream of this thread; None changes nothing."""
    if stream is not None:
        _thread.stream = _checked("set_stream", stream)


def current_stream(device: Device = None) -> Stream:
    """Return the stream that this thread chose last, else the default stream."""
    check_device("current_stream", device)
    chosen: Stream | None = getattr(_thread, "stream", None)
    return default_stream() if chosen is None else chosen


def default_stream(device: Device = None) -> Stream:
    """Return the stream that is current if a thread has chosen none: the same object in the whole process."""
    check_device("default_stream", device)
    kind = in_use().device_type
    if kind not in _defaults:
        _defaults[kind] = Stream()
    return _defaults[kind]


def _wait() -> None:
    runtime = in_use().runtime
    if not hasattr(runtime, "synchronize"):
        raise missing("synchronize")
    runtime.synchronize()


def _checked(name: str, stream: object) -> Stream:
    if not isinstance(stream, Stream):
        raise PolicyError(
            f"accel.{name}({stream!r}): on the device in use, of type {in_use().device_type!r}, this must be an "
            "xamp.accel.Stream or None. Make it with xamp.accel.Stream()."
        )
    return stream
