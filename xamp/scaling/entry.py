"""What :class:`xamp.scaling.gradients.Gradients` remembers from one ``scale_loss`` to its end, or to the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xamp.scaling.ranks import local
from xamp.scaling.scale import LossScaler

__all__ = ["NOTHING", "OUTSIDE", "Entry", "Pending"]


class Pending:
    """Describes gradients that are still scaled, because of ``delay_unscale`` or a wrapper that has yet to reduce them.

    Attributes:
        why: the reason, for messages.
        overflow: on a chip that reports an overflow by a flag: the flag so far, because the next backward clears it.
    """

    def __init__(self, scaler: LossScaler, why: str, overflow: torch.Tensor | None) -> None:
        self.version = scaler.version
        self.inverse = scaler.inverse.clone()
        self.why = why
        self.overflow = overflow


class Entry:
    """The gradients as they were on entering ``scale_loss``.

    After an exception in the body, they show whether the body changed the gradients.
    """

    def __init__(
        self,
        grads: Sequence[torch.Tensor] = (),
        stash: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        complete: bool = True,
    ) -> None:
        self.grads = grads
        self.stash = stash  # (parameter, its gradient before)
        self.versions = [_version(g) for g in grads]
        self.complete = complete  # False: these are the gradients of before, and one operation changes them now

    def was_multiplied(self) -> bool:
        """Return whether the operation that was to multiply the gradients was run, on all of them."""
        return all(_version(g) == v + 1 for g, v in zip(self.grads, self.versions, strict=True))

    def untouched(self, now: Sequence[torch.Tensor]) -> bool:
        """Return whether ``now`` holds the same tensors as on entry, and nobody has written to them."""
        return len(now) == len(self.grads) and all(
            a is b and _version(a) == v for a, b, v in zip(now, self.grads, self.versions, strict=True)
        )

    def to_put_back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs (gradient now, its value that was put aside), without gradients cleared in the meantime."""
        return [(p.grad, old) for p, old in self.stash or () if p.grad is not None]


def _version(grad: torch.Tensor) -> int:
    """Return a number that each write changes: autograd writes into the shell of a DTensor, FSDP2 into its part."""
    part = local(grad)
    return grad._version if part is grad else grad._version + part._version


NOTHING = Entry()
"""There were no gradients."""

OUTSIDE = Entry()
"""No backward has been entered: the gradients are what they were."""
