"""When the host knows a number of the device: how often it waits to read one, how many steps later it learns it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from xamp.registry import registry
from xamp.scaling import counts, outcomes
from xamp.sessions import scaler_steps
from xamp.torch_compat.torch_private import aten
from xamp.torch_compat.torch_private.modes import TorchDispatchMode
from xamp.values.late_reads import HISTORY_LAG, copies_without_waiting

if TYPE_CHECKING:  # with pytest, which who only measures need not have
    from xamp.testing.lane import Lane

__all__ = ["HostReads", "host_as_device", "no_waiting", "steps_late"]


class HostReads(TorchDispatchMode):
    """While open, counts scalars read from a device, and copies from it that are not asynchronous.

    On the host itself every read counts, by any code. There the caller has to subtract the reads of a plain loop.

    Attributes:
        names: The operator or method of each read.
    """

    paused: ClassVar[bool] = False
    """True while the code reads numbers that have long been on the host, which does not count."""
    METHODS = ("item", "tolist", "cpu")  # on host memory these may not go through the dispatcher

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._on_host = device.type == registry.HOST
        self._inside = False
        self._patches = contextlib.ExitStack()

    @property
    def count(self) -> int:
        """The number of reads."""
        return len(self.names)

    def __enter__(self) -> HostReads:
        for name in self.METHODS:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._counted(name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _counted(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(tensor, *args, **kwargs)
            self._note(f"Tensor.{name}", tensor)
            self._inside = True
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._inside = False

        return method

    def _note(self, name: str, read: torch.Tensor) -> None:
        if not self.paused and (self._on_host or not read.is_cpu):
            self.names.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it brings numbers to the host."""
        read = None if self._inside else _read_by(func, args, kwargs or {})
        if read is not None:
            self._note(str(func), read)
        return func(*args, **(kwargs or {}))


def _read_by(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor whose numbers the host waits for in ``func``; None if it does not wait."""
    read: torch.Tensor | None = None
    if func is aten.local_scalar_dense:
        read = args[0]
    elif func is aten.to_copy:
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == registry.HOST and not kwargs.get("non_blocking"):
            read = None if args[0].is_cpu else args[0]
    elif func is torch.ops.aten.copy_.default and args[0].is_cpu and not args[1].is_cpu:
        read = None if (args[2] if len(args) > 2 else kwargs.get("non_blocking")) else args[1]
    return read


class _Arrived:
    """The event of a copy that has already finished."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _LateHistory(counts.History):
    """A history that is copied and read many steps later, as on a device with asynchronous copies."""

    @staticmethod
    def comes_late(_: torch.Tensor) -> bool:
        """Say yes."""
        return True

    def _copy(self) -> tuple[torch.Tensor, Any]:
        return self._values.clone(), _Arrived()

    def _oldest(self) -> tuple[Any, list[float]]:
        with mock.patch.object(HostReads, "paused", True):
            return super()._oldest()


def steps_late(lane: Lane, optimizer: torch.optim.Optimizer) -> int:
    """After how many steps the host learns by itself what a step of ``optimizer`` did; 0: with the step.

    It learns late where the device decides, which a fused implementation that is right there allows, and where numbers
    come without waiting.
    """
    right = any(cls.__name__ in lane.can.fused_optimizers for cls in type(optimizer).__mro__)
    decides = right and all(group.get("fused") for group in optimizer.param_groups)
    return HISTORY_LAG if decides and lane.kind != registry.HOST and copies_without_waiting(lane.device) else 0


@contextlib.contextmanager
def no_waiting(lane: Lane) -> Iterator[None]:
    """If the device's runtime can raise at the first operation that waits, turn that on while the context is open."""
    set_mode = getattr(lane.backend.runtime(lane.kind), "set_sync_debug_mode", None)
    if set_mode is None:
        yield
        return
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


@contextlib.contextmanager
def host_as_device(device: torch.device) -> Iterator[None]:
    """Make sessions created in the context record their steps on the host as they do on an accelerator.

    Normally a session on the host reads at once, because that waits for nothing; the accelerator's path would not run.
    """
    if device.type != registry.HOST:
        yield
        return
    with contextlib.ExitStack() as stack:
        for user in (outcomes, scaler_steps):
            stack.enter_context(mock.patch.object(user, "History", _LateHistory))
        yield
