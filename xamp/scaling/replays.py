"""What a captured step did when the device replayed it, without Python.

A graph (``torch.cuda.graph``) holds kernels only: no code of xamp runs at a replay. So a step that is captured counts
on the device. The tensors are made with the optimizer's state: a tensor made in a capture would start anew with each
replay. The host reads them when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from xamp.scaling.scale import COLLAPSE_RUN, LossScaler

__all__ = ["Replays"]


class Replays:
    """Counts the replays of one optimizer's captured steps.

    Args:
        device: the device of the loss scale.
        losses: number of loss scales.
        captures: tells whether a graph is being captured now; None: the device has no graphs.

    Attributes:
        flag: the overflow flag of the step that was captured last, as the newest replay left it; None: none was.
        used: indices of the loss scales of that step.
    """

    def __init__(self, device: torch.device, losses: int, captures: Callable[[], bool] | None) -> None:
        self._captures = captures
        self.flag: torch.Tensor | None = None
        self.used: Sequence[int] = ()
        self._told = 0
        if captures is not None:
            self._counts = torch.zeros(4, dtype=torch.int64, device=device)  # steps, skipped, run, complete runs
            # After the step before.
            self._scales = torch.full((losses,), float("inf"), dtype=torch.float32, device=device)

    def capturing(self) -> bool:
        """Return whether a graph is being captured now."""
        return self._captures is not None and self._captures()

    @torch.no_grad()
    def count(
        self,
        flag: torch.Tensor,
        scales: torch.Tensor,
        scalers: Sequence[LossScaler],
        used: Iterable[int],
        *,
        moved_before_step: bool,
    ) -> None:
        """Put into the graph the operators that count one step.

        Args:
            flag: fp32 scalar, 1.0 where the step is skipped. It must be of this step alone.
            scales: all loss scales at this step.
            scalers: the scalers, for their rules.
            used: indices of the scales that scaled the losses of this step.
            moved_before_step: see :class:`xamp.scaling.scale.CollapseWatch`.
        """
        self.flag, self.used = flag, tuple(used)
        had = self._scales if moved_before_step else scales
        steps, skipped, run, complete = self._counts.unbind()
        overflowed = flag.ne(0)
        stuck = overflowed.clone()
        for index in self.used:
            if (rules := scalers[index].rules).falls:
                stuck &= had[index] <= rules.floor
        steps.add_(1)
        skipped.add_(overflowed)
        run.add_(1).mul_(stuck)
        complete.add_(run.gt(0) & run.remainder(COLLAPSE_RUN).eq(0))
        self._scales.copy_(scales)

    def read(self) -> tuple[int, int]:
        """Return how many replayed steps were applied and skipped. Waits for the device."""
        if self.flag is None:
            return 0, 0
        steps, skipped = self._counts[:2].tolist()
        return steps - skipped, skipped

    def newly_collapsed(self) -> bool:
        """Return whether a run of overflows that no smaller scale can cure is complete, and was not told yet."""
        if self.flag is None:
            return False
        complete = int(self._counts[3])
        before, self._told = self._told, complete
        return complete > before
