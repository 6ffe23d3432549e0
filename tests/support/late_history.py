"""A stand-in for a device with asynchronous copies, whose numbers the host reads some steps late."""

from __future__ import annotations

from typing import Any

import torch

from xamp.scaling.counts import History


class _Arrived:
    """An event that has happened."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class LateHistory(History):
    """A history that behaves, in host memory, as on a device with asynchronous copies."""

    @staticmethod
    def comes_late(values: torch.Tensor) -> bool:
        return True

    def _copy(self) -> tuple[torch.Tensor, Any]:
        return self._values.clone(), _Arrived()
