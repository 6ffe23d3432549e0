"""Streams and events of a device with one queue of work, such as a CPU.

All work runs in the order in which it was given: a stream waits for nothing, and whatever was recorded is next in line.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import Any

import torch

from xamp.accel.use import Device, check_device, in_use, missing
from xamp.errors import PolicyError, StateError
from xamp.registry.registry import HOST

# Only together: an event of one kind cannot be recorded in a stream of another.
__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]

_thread = threading.local()  # .stream: the current one, where one was chosen
_defaults: dict[str, Stream] = {}  # by device type
_OURS = 0x78616D70 << 16  # ids from here on tell torch's operators that a stream is one of these
_ids = itertools.count(_OURS)
_recording: set[str] = set()  # device types that record_stream runs on, or cannot
_lock = threading.Lock()


class Stream(torch.Stream):
    """The one queue of the device, under torch.cuda's name for several.

    It is a ``torch.Stream``, as that of torch.cuda is, since ``tensor.record_stream`` takes nothing else.

    Args:
        device: as torch.cuda takes it.
        priority: kept, and without effect.
        kwargs: what torch.cuda.Stream takes to wrap a stream of its own; without effect.

    Raises:
        PolicyError: ``device`` is not of the type in use.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Give the stream an id of its own; a stream of device type 0, the CPU's, can be made on any machine."""
        return super().__new__(cls, stream_id=next(_ids), device_index=-1, device_type=0)

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        check_device("Stream", device)
        kind = in_use().device_type
        self.priority = priority
        self._device = torch.device(kind) if kind == HOST else torch.device(kind, 0)
        self._around: list[StreamContext] = []
        _let_record(kind)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a variable in torch's annotations
        """The device in use when it was made."""
        return self._device

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        _wait()

    def query(self) -> bool:
        """Whether all work given to the device is done: waits for it, so that it is."""
        _wait()
        return True

    def wait_stream(self, stream: torch.Stream) -> None:
        """Nothing: what was given to ``stream`` before is done before."""

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # these events only
        """Nothing: what was given before ``event`` is done before."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record ``event`` (None: a new one) and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Lowest and highest priority: there is one only."""
        return 0, 0

    def __enter__(self) -> Stream:
        self._around.append(StreamContext(self))
        self._around[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._around.pop().__exit__(*raised)

    def __repr__(self) -> str:
        return f"<xamp.accel.Stream device={self.device}>"


def _let_record(kind: str) -> None:
    """Give devices of this type a ``tensor.record_stream`` where torch has none; any other stream is refused as before.

    Nothing is left to do in it: work that is given later uses the tensor's memory later.
    """

    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        if stream.stream_id < _OURS:
            raise NotImplementedError(f"record_stream on {kind}: torch has no streams there; take xamp.accel's")

    with _lock:
        if kind in _recording:
            return
        try:
            torch.empty(0, device=kind).record_stream(torch.Stream(stream_id=_OURS, device_index=-1, device_type=0))
        except NotImplementedError:
            torch.library.register_kernel("aten::record_stream", kind, record_stream)
        except RuntimeError:
            pass  # torch has one, for streams that its module does not show
        _recording.add(kind)


class Event:
    """A point in the one queue of the device.

    Args:
        enable_timing: whether :meth:`elapsed_time` may be asked; each record then waits for the device.
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
        """Take the time at which the work given so far is done."""
        if self._timing:
            _wait()
            self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing: what was given before the event is done before anything given now."""

    def synchronize(self) -> None:
        """Wait for all work given to the device, what came before the event included."""
        _wait()

    def query(self) -> bool:
        """Whether the work before the event is done: waits for it, so that it is."""
        _wait()
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            StateError: one of the two is not timed or was not recorded.
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
    """Makes ``stream`` the current one of this thread within its block; may be entered again.

    Args:
        stream: a :class:`Stream`; None changes nothing.

    Raises:
        PolicyError: it is neither.
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
    """See :class:`StreamContext`."""
    return StreamContext(stream)


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` the current one of this thread; None changes nothing."""
    if stream is not None:
        _thread.stream = _checked("set_stream", stream)


def current_stream(device: Device = None) -> Stream:
    """The stream that this thread chose last, else the default one."""
    check_device("current_stream", device)
    chosen: Stream | None = getattr(_thread, "stream", None)
    return default_stream() if chosen is None else chosen


def default_stream(device: Device = None) -> Stream:
    """The stream that is current where none was chosen; the same object for all of the process."""
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
