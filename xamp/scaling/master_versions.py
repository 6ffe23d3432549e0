"""Whether the lowered parameters of one optimizer still agree with their masters, told by the masters' versions."""

from __future__ import annotations

import torch

from xamp.ground.compiler import keep_eager
from xamp.ground.torch_private.modes import disable_current_modes
from xamp.scaling import followers, masters
from xamp.scaling.gradients import Gradients

__all__ = ["MasterVersions"]


class MasterVersions:
    """The versions that the masters had when they were last written into the model.

    Args:
        gradients: the gradients of the optimizer, which know its masters.

    Attributes:
        lent: compiled code got the masters to write into since the last step or eager forward, or a step was
            interrupted, and nothing tells whether they were written to.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._seen: list[int] = []
        self.lent = False

    def note(self) -> None:
        """Remember the masters' versions: the lowered parameters agree with them."""
        self._seen = [master._version for _, master in self._gradients.pairs]

    @property
    def are_old(self) -> bool:
        """Whether something other than a step has changed a master, and the model has not followed."""
        return self._seen != [master._version for _, master in self._gradients.pairs]

    @property
    def were_missed(self) -> bool:
        """Whether the model has not followed a change. A load has written what it loaded into the model too."""
        return self.are_old and any(
            master._version != seen and not masters.agrees(master)
            for (_, master), seen in zip(self._gradients.pairs, self._seen, strict=True)
        )

    def distrust(self) -> None:
        """Called when a step was interrupted: let the model follow masters that a fused kernel may have moved.

        Such a kernel gives them no new version.
        """
        moved = [master for _, master in self._gradients.pairs]
        if moved:
            torch.autograd.graph.increment_version(moved)
            self.lent = followers.graphs.ask = True

    def lend(self) -> None:
        """Called when user code has had the masters one by one: let the model follow if it wrote into one."""
        if torch.compiler.is_compiling():
            self.lent = followers.graphs.ask = True
        else:  # now, for a copy may be made, or a part of the model called, before the next forward
            self.follow()

    @keep_eager
    def follow(self) -> None:
        """Before a forward: write those masters into the model that something other than ``step`` has changed.

        SAM perturbs and restores weights in methods of its own; a script may average weights in ``master_params``.
        Costs 0.05 us a master where nothing has changed.
        """
        if self.are_old:
            before, pairs = self._seen, self._gradients.pairs
            with disable_current_modes():  # as of torch.export: these are the real weights
                masters.write_changed(
                    [pair for pair, seen in zip(pairs, before, strict=True) if pair[1]._version != seen]
                )
            self.note()
        if self.lent:
            self.lent = False
            followers.look()

    def at_rest(self) -> list[masters.Pair]:
        """Return the pairs whose masters nothing but a step, or what the model followed, has written to."""
        return [pair for pair, seen in zip(self._gradients.pairs, self._seen, strict=True) if pair[1]._version == seen]
