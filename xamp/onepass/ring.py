"""Small tables that change each step, sent to the device without a wait, and not written again before they arrived."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Lane", "PointerRing"]


class Lane:
    """What a ring asks of a device. Events and captures are those of ``torch.get_device_module``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device the current one for a while."""
        return contextlib.nullcontext() if self._module is None else self._module.device(self.device)  # type: ignore[no-any-return]

    def pinned(self, length: int) -> torch.Tensor:
        """Return a table on the host that copies can read without a wait."""
        return torch.zeros(length, dtype=torch.int64, pin_memory=self._module is not None)

    def copy(self, there: torch.Tensor, here: torch.Tensor) -> None:
        """Queue a copy of a pinned table to the device."""
        there.copy_(here, non_blocking=True)

    def event(self) -> Any:
        """Return an event with ``record``, ``query`` and ``synchronize``, or None where copies are done at once."""
        return None if self._module is None else self._module.Event()

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return bool(asked is not None and asked())


class _Slot:
    def __init__(self, lane: Lane, length: int) -> None:
        self.here = lane.pinned(length)
        self.there = torch.zeros(length, dtype=torch.int64, device=lane.device)
        self.event = lane.event()


class PointerRing:
    """Tables of int64, each pinned on the host, with its place on the device and an event that guards both.

    A host that runs ahead gets more tables, up to ``most``, and waits for the oldest after that. What a captured graph
    copies belongs to the graph: it is never written again.

    Args:
        length: of each table.
        device: where tables are sent.
        lane: how copies and events are made.
        most: tables to have at the same time.
    """

    def __init__(self, length: int, device: torch.device, lane: Lane | None = None, most: int = 16) -> None:
        self._lane = lane or Lane(device)
        self._length, self._most = length, most
        self._slots = [_Slot(self._lane, length) for _ in range(2)]
        self._spare = [_Slot(self._lane, length) for _ in range(2)] if self._lane.event() is not None else []
        self._captured: list[_Slot] = []
        self._current: _Slot | None = None

    def send(self, values: Sequence[int]) -> torch.Tensor:
        """Queue a copy of ``values`` and return the table on the device. The host does not wait."""
        slot = self._captured_slot() if self._lane.capturing() else self._free_slot()
        slot.here.copy_(torch.tensor(values, dtype=torch.int64))
        self._lane.copy(slot.there, slot.here)
        self._current = slot
        self.used()
        return slot.there

    def used(self) -> None:
        """Note that what was queued so far on the current stream reads the table sent last."""
        slot = self._current
        if slot is not None and slot.event is not None and slot not in self._captured:
            slot.event.record()

    def _free_slot(self) -> _Slot:
        while self._captured and len(self._spare) < 2:  # a capture cannot pin memory: here is the time for it
            self._spare.append(_Slot(self._lane, self._length))
        slot = self._slots.pop(0)
        if slot.event is not None and not slot.event.query():
            if len(self._slots) + 1 < self._most:
                self._slots.insert(0, slot)
                slot = _Slot(self._lane, self._length)
            else:
                slot.event.synchronize()
        self._slots.append(slot)
        return slot

    def _captured_slot(self) -> _Slot:
        slot = self._spare.pop() if self._spare else _Slot(self._lane, self._length)
        self._captured.append(slot)
        return slot
