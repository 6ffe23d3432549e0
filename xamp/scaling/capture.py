"""Steps in a captured graph: no code of xamp runs at a replay, so the device counts them and the host asks later.

:class:`Capture` tells whether a graph is being captured on the device of a session. :class:`Replays` counts the steps
of one optimizer there. What the host would have to decide at a step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from xamp.contract import Backend
from xamp.errors import StateError
from xamp.policy import listed
from xamp.scaling.counts import COLLAPSE_RUN, CollapseWatch, Counts
from xamp.scaling.scale import DeviceState

__all__ = ["Capture", "Replays", "host_step_refusal"]


class Capture:
    """Tells whether a graph is being captured.

    Args:
        check: see :meth:`xamp.contract.Backend.capture_check`.

    Attributes:
        possible: the device can capture a graph.
    """

    def __init__(self, check: Callable[[], bool] | None) -> None:
        self.possible = check is not None
        self._check = check
        self._moves_scales = False

    @classmethod
    def of(cls, backend: Backend, device: torch.device) -> Capture:
        """Return the object that tells of captures on ``device``."""
        return cls(backend.capture_check(device))

    def is_running(self) -> bool:
        """Return whether a graph is being captured now."""
        return self._check is not None and self._check()

    def refuse_host_step(self, name: str, can_skip: bool, backend: Backend, device: torch.device) -> None:
        """Raise a StateError in a capture, for a step on which the host decides; see :func:`host_step_refusal`."""
        if self.is_running():
            raise StateError(f"optimizer.step(): {host_step_refusal(name, can_skip, backend, device)}")

    def note_use_of_scale(self) -> bool:
        """Take note that the session uses a scale; return whether replays move its scales, of which nobody tells.

        They do from the first use in a capture on.
        """
        if not self._moves_scales and self._check is not None:
            self._moves_scales = self._check()
        return self._moves_scales

    def refuse_other_side(self, held_in_one: bool, call: str) -> None:
        """Raise a StateError where gradients were held on one side of a capture, and ``call`` comes on the other.

        A graph that holds gradients for a step in one pass holds that step too: a replay makes them anew.
        """
        if self.is_running() == held_in_one:
            return
        why = "before the capture of this graph, whose replays would read them again: call optimizer.zero_grad() first"
        if held_in_one:
            why = (
                "in a graph, and with fused='one-pass' graphs hold their step too: capture scale_loss and "
                "optimizer.step() in one graph"
            )
        raise StateError(
            f"{call}: the gradients that are there were made {why}. With fused='auto' and an optimizer made with "
            "fused=True graphs may hold any part of a step."
        )


class Replays:
    """Counts one optimizer's steps on the device, from the first that is captured in a graph.

    The run of overflows is the device's from then on: eager steps go into it too, by operators that only such an
    optimizer pays for. The number of eager steps is the host's.

    Attributes:
        flag: the overflow flag of the step that was captured last, as the newest replay left it; None: none was.
        scales: indices of the loss scales of that step.
    """

    def __init__(self, counts: Counts, memory: DeviceState, capture: Capture) -> None:
        self.flag: torch.Tensor | None = None
        self.scales: Sequence[int] = ()
        self._capture = capture
        self._told = 0
        self._all_scales = memory.scales
        if capture.possible:  # here, for a tensor that is made in a capture starts anew with each replay
            device = memory.values.device
            self._numbers = torch.zeros(4, dtype=torch.int64, device=device)  # steps, skipped, complete runs, run
            self._watch = CollapseWatch(counts, self._numbers[3], torch.full_like(memory.scales, float("inf")))

    def record(self, flag: torch.Tensor, used: Iterable[int]) -> bool:
        """Record one step on the device, where it belongs there; return whether that is all, as in a capture.

        Args:
            flag: fp32 scalar, 1.0 where the step is skipped. It must be of this step alone.
            used: indices of the loss scales that scaled its losses.
        """
        if self._capture.is_running():
            self._count(flag, used)
            return True
        if self.flag is not None:
            self._add_to_run(flag, used)
        return False

    @torch.no_grad()
    def _count(self, flag: torch.Tensor, used: Iterable[int]) -> None:
        """Put into the graph the operators that count one step."""
        self.flag, self.scales = flag, tuple(used)
        self._numbers[0].add_(1)
        self._numbers[1].add_(flag.ne(0))
        self._add_to_run(flag, self.scales)

    @torch.no_grad()
    def _add_to_run(self, flag: torch.Tensor, used: Iterable[int]) -> None:
        """Let a step go into the run of overflows."""
        run, complete = self._watch.after(flag.ne(0), used)
        self._numbers[2].add_(complete)
        self._watch.run.copy_(run)
        self._watch.scales.copy_(self._all_scales)

    def read(self) -> tuple[int, int]:
        """Return how many replayed steps were applied and skipped. Waits for the device."""
        if self.flag is None:
            return 0, 0
        steps, skipped = self._numbers[:2].tolist()
        return steps - skipped, skipped

    def take_collapse(self) -> bool:
        """Take note of runs of overflows that no smaller scale can cure; return whether a new one is complete."""
        if self.flag is None:
            return False
        before, self._told = self._told, int(self._numbers[2])
        return self._told > before

    def overflow_run(self) -> int:
        """Return the run of overflows if a graph holds a step: :meth:`xamp.scaling.outcomes.Outcomes.overflow_run`."""
        complete, run = self._numbers[2:].tolist()
        return COLLAPSE_RUN - 1 if complete > self._told else run

    def resume(self, run: int) -> None:
        """Count from 0 again, after ``run`` overflows in a row with the scales as they are now."""
        if self.flag is not None:
            self._numbers.zero_()
            self._watch.run.fill_(run)
            self._watch.scales.copy_(self._all_scales)
            self._told = 0

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that :meth:`resume` writes."""
        return [] if self.flag is None else [self._numbers, self._watch.scales]


def host_step_refusal(name: str, can_skip: bool, backend: Backend, device: torch.device) -> str:
    """Return why a graph cannot hold a step on which the host decides, and the cure.

    Args:
        name: the class of the optimizer.
        can_skip: its kernel skips by a flag, so that only the first step of a parameter is the host's.
        backend: names the classes that can.
        device: the device.
    """
    why = "its parameters have had no step yet, and the host decides on the first"
    cure = "Run at least one whole training step before the capture"
    if not can_skip:
        there = backend.capabilities(device).fused_optimizers
        why = f"this {name} cannot skip on the device"
        others = f", as {listed(there)} have" if there else ""
        cure = f"Take an optimizer with a fused implementation that is right on {device}{others}"
        if name in there:
            cure = f"Make it fused: torch.optim.{name}(..., fused=True), with capturable=True where it has that option"
    return (
        f"while a graph is captured the host cannot read whether to skip this step; {why}. {cure}, or leave the step "
        "out of the graph."
    )
