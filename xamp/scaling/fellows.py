"""The ranks that share a session's parameters: what a step asks of :mod:`xamp.distributed`, and what it is refused for.

Where nothing is shared between processes, each question here costs the look at two flags.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from xamp.distributed import ddp as ddps
from xamp.distributed import ranks
from xamp.distributed.wrappers import Wrappers
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.scaling.masters import master_of

if TYPE_CHECKING:
    from xamp.distributed.rank_settings import SessionSettings

__all__ = ["Fellows", "Unreduced"]


class Unreduced(NamedTuple):
    """The gradients of one optimizer that a wrapper around the models keeps, to reduce them later.

    Attributes:
        by_wrapper: returns whether there is a wrapper that may have yet to reduce gradients.
        gradients: returns those that it keeps outside of any ``.grad``.
    """

    by_wrapper: Callable[[], bool]
    gradients: Callable[[], Sequence[torch.Tensor]]


class Fellows:
    """The ranks that share the parameters of one session.

    Args:
        models: the models, weakly.
        policy: the settings, which all ranks must have.
        group: the ranks that decide together; None: those of the wrappers that hold the parameters, else all.
        enabled: False for a session that was switched off.
        gradients_tell: an overflow shows in the gradients, so that those who share them know of it.

    Attributes:
        alone: when the last backward began, nothing was shared between processes.
        has_wrappers: a DDP or FSDP holds a model, or a part of one.
        refusal: why no step can be right any more, for an error; empty: it can.
    """

    def __init__(
        self,
        models: Sequence[weakref.ref[nn.Module]],
        policy: Policy,
        group: Any,
        enabled: bool,
        gradients_tell: bool,
    ) -> None:
        self.alone = True
        self.has_wrappers = False
        self.refusal = ""
        self._policy = policy
        self._gradients_tell = gradients_tell
        self._wrappers = Wrappers(models, group)
        self._enabled = enabled

    @functools.cached_property
    def _settings(self) -> SessionSettings:
        from xamp.distributed.rank_settings import SessionSettings  # one process compares none

        return SessionSettings(self._wrappers, self._policy, self._enabled)

    # ---------------------------------------------------------------- before a backward

    def look(self) -> Sequence[DistributedDataParallel]:
        """Look for what is shared; return the DDPs that are new. Comes before each backward."""
        self.alone = not (ranks.is_running() or ddps.noted.data)  # `.data`: a weak dictionary counts in Python
        if self.alone:
            self.has_wrappers = False
            return ()
        new_wrappers = self._wrappers.find()
        self.has_wrappers = self._wrappers.hold_any()
        return new_wrappers

    def prepare_backward(
        self,
        new_wrappers: Sequence[DistributedDataParallel],
        params: Sequence[torch.Tensor],
        optimizers: Iterable[Optimizer],
        scales: Iterable[float],
        *,
        has_masters: bool,
    ) -> None:
        """Refuse ranks that differ in their settings, or may run out of batches before others.

        Args:
            new_wrappers: what :meth:`look` returned.
            params: those of the optimizers, as the models know them.
            optimizers: for messages.
            scales: the loss scales that the host has set.
            has_masters: whether there are any.
        """
        if self._wrappers.may_be_left(params):
            ddps.refuse_join(self._policy, has_masters, list(optimizers))
        if new_wrappers or not self._settings.is_compared:
            self._compare(params, scales)
            if self._policy.checks:
                ddps.warn_of_memory(new_wrappers)

    def compare_settings(self, params: Sequence[torch.Tensor], scales: Iterable[float]) -> None:
        """Compare the settings with those of the ranks that share the models."""
        if not self._settings.is_compared:
            self._wrappers.find()
            self._compare(params, scales)

    def _compare(self, params: Sequence[torch.Tensor], scales: Iterable[float]) -> None:
        if ranks.is_running():
            self._settings.compare(list(scales), params)

    @property
    def is_compared(self) -> bool:
        """Whether the settings were compared with those of the ranks that share the models."""
        return self._settings.is_compared

    def compare_again(self) -> None:
        """Compare with ranks that had not written their settings before: by now all have."""
        if not self._settings.is_compared:
            self._settings.compare_again()

    def kept_by_wrappers(
        self, own: Callable[[], Sequence[torch.Tensor]], others: Callable[[], Iterable[torch.Tensor]]
    ) -> Unreduced:
        """Return an :class:`Unreduced` for the gradients that FSDP keeps outside of any ``.grad``.

        Args:
            own: returns the parameters of an optimizer.
            others: returns those of the other optimizers.
        """

        def hidden() -> Sequence[torch.Tensor]:
            return self._wrappers.hidden_gradients(own(), others()) if self.has_wrappers else []

        return Unreduced(lambda: self.has_wrappers, hidden)

    # ---------------------------------------------------------------- after a backward, and at a step

    def postpone(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether a wrapper has yet to reduce the gradients that the last backward left in ``params``."""
        return not self.alone and self._wrappers.postponed(params)

    def agree(self, flags: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
        """Raise ``flags`` (1.0: overflow) to their maximum over the ranks that decide together."""
        if not self.alone:
            self._wrappers.agree(flags, params, not self._gradients_tell)

    def note_error(self, params: Sequence[torch.Tensor], kind: type[BaseException]) -> None:
        """Refuse steps from now on if others wait for this rank, where the body of a ``scale_loss`` has raised."""
        why = "" if self.alone else self._wrappers.lost_by_raising(params)
        if why:
            self.refusal = (
                f"a backward in scale_loss raised {kind.__name__} on this rank, and {why}. Let the error end this "
                "process, so that the others end too, and go on from a checkpoint; torchrun restarts all of them."
            )

    # ---------------------------------------------------------------- parameters

    def remember_params(self, params: Iterable[torch.Tensor]) -> None:
        """Remember which of ``params``, those of optimizers, are in the models now, and where."""
        self._wrappers.remember_params(params)

    def layout(self, param: torch.Tensor) -> ranks.Layout:
        """Return how the elements of ``param`` lie on the ranks."""
        return self._wrappers.layout(param)

    def refuse_sharded(self, call: str, held: Iterable[tuple[Optimizer, torch.Tensor]]) -> None:
        """Raise a StateError for a model that was sharded or parallelized after ``initialize``.

        That replaced its parameters: a step would move the old ones, or masters of whole ones, and not the model.
        ``held``: each optimizer with each of its parameters, as the models knew them.
        """
        held = list(held)
        lost = self._wrappers.lost([p for _, p in held], master_of)
        if lost:
            name = next(type(optimizer).__name__ for optimizer, p in held if p is lost[0])
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise StateError(
                f"{call}: the model was sharded since initialize (fully_shard, FullyShardedDataParallel, "
                "parallelize_module or a DDP with device_mesh), and a parameter of shape "
                f"{tuple(lost[0].shape)}{others} that {name} holds is none of the model's any more, so that no step "
                "would reach the model. Shard first, then make the optimizer from model.parameters(), then call "
                "initialize."
            )
