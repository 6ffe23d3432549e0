"""Gradients that the engine has taken off the model, still scaled and in 16 bits, for a step in one pass.

Only ``fused="one-pass"`` asks for it. :class:`xamp.scaling.gradients.Gradients` owns them: whoever asks it for
gradients gets these moved into the masters first, or reads them by the kernels of :mod:`xamp.scaling.one_pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from xamp.scaling.masters import Pair
from xamp.torch_compat import kernels

__all__ = ["Held"]


class Held:
    """The gradients of one backward, by the pairs of parameter and master that they belong to.

    Args:
        pairs: low-precision parameters and their masters.
        grads: for each pair its scaled gradient, or None. They are no longer on the model.
        inverse: 1/scale, a copy, for the scale moves before the step; None: they have no scale.
        seen: what a kernel has seen of them; see :class:`xamp.scaling.one_pass.Seen`.
        refuse: raises a StateError where a call comes when these gradients are not there.

    Attributes:
        grads: see above. What was cleared is None.
        clip: what ``clip_grad_norm_`` multiplies them by; None: 1.
        is_whole: nothing was cleared since they were checked, so that the norm of the check is theirs.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        grads: Sequence[torch.Tensor | None],
        inverse: torch.Tensor | None,
        seen: Any,
        refuse: Callable[[str], None],
    ) -> None:
        self.pairs = pairs
        self.grads = list(grads)
        self.inverse = inverse
        self.clip: torch.Tensor | None = None
        self.is_whole = True
        self.seen = seen
        self.refuse = refuse

    def clip_by(self, factor: torch.Tensor) -> None:
        """Let the gradients be multiplied by ``factor``, too, when they are read."""
        self.clip = factor if self.clip is None else self.clip * factor

    def clear(self, params: Iterable[torch.Tensor]) -> bool:
        """Clear the gradients of some low-precision parameters; return whether any is left."""
        gone = {id(param) for param in params}
        self.grads = [
            None if id(param) in gone else grad for (param, _), grad in zip(self.pairs, self.grads, strict=True)
        ]
        self.is_whole = False
        return any(grad is not None for grad in self.grads)

    @torch.no_grad()
    def gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of ``param``, unscaled and clipped; None where there is none."""
        self.refuse("grad")
        for (own, _), grad in zip(self.pairs, self.grads, strict=True):
            if own is param and grad is not None:
                full = grad.float()
                for factor in (self.inverse, self.clip):
                    full = full if factor is None else full * factor
                return full
        return None

    def present(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each master that has a gradient here, and that gradient, scaled as it is."""
        for (_, master), grad in zip(self.pairs, self.grads, strict=True):
            if grad is not None:
                yield master, grad

    @torch.no_grad()
    def move(self, chunks: Callable[[Sequence[Pair]], Iterator[Sequence[Pair]]]) -> None:
        """Unscale the gradients into the ``.grad`` of their masters, and free them chunk by chunk."""
        places = {id(param): index for index, (param, _) in enumerate(self.pairs)}
        for chunk in chunks([pair for pair, grad in zip(self.pairs, self.grads, strict=True) if grad is not None]):
            own = [places[id(param)] for param, _ in chunk]
            full = [torch.empty_like(master) for _, master in chunk]
            kernels.copy_(full, [self.grads[index] for index in own])  # type: ignore[misc]
            for factor in (self.inverse, self.clip):
                if factor is not None:
                    kernels.multiply_(full, factor)
            for index, (_, master), grad in zip(own, chunk, full, strict=True):
                self.grads[index] = None
                master.grad = grad if master.grad is None else master.grad.add_(grad)
