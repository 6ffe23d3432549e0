"""``amp.scale_loss`` and what belongs to it: the loss scales' state, and the parameters that an optimizer steps."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.apex._engine import ApexEngine, ApexLoss
from xamp.apex._state import state
from xamp.errors import StateError
from xamp.ground.log import say
from xamp.scaling.optimizer import state_of
from xamp.scaling.step import OptimizerState
from xamp.sessions import session

__all__ = ["load_state_dict", "master_params", "scale_loss", "state_dict"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale a loss; on leaving, unscale the gradients that its backward left, and move the scale.

    Where a gradient is not finite under a dynamic scale, every optimizer given here skips its next step.

    Args:
        loss: the loss; more than one element is as good.
        optimizers: the optimizer, or all of them, whose parameters get gradients from it.
        loss_id: which loss scale, of the ``num_losses`` that ``initialize`` made.
        model: Apex does not use it.
        delay_unscale: leave the gradients scaled; a later call unscales them along with its own.
        delay_overflow_check: unscale, but neither skip a step nor move the scale for what this backward found.

    Returns:
        A context manager that yields the scaled loss, fp32.

    Raises:
        RuntimeError: before ``initialize``, or optimizers that it was not given. IndexError: no such loss scale.
    """
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    states = [found for optimizer in given if (found := state_of(optimizer)) is not None]
    if not states and not hasattr(state, "opt_properties"):
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
        )
    if not states and not state.opt_properties.enabled:
        return contextlib.nullcontext(loss)
    engine = _engine_of(states)
    if not isinstance(engine, ApexEngine):  # of xamp.initialize
        return session.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)
    scaler = engine.scalers[loss_id]
    if not engine.has_work(scaler):
        return _Unscaled(engine, loss.float())
    if len(states) < len(given):
        raise StateError(
            "amp.scale_loss: an optimizer was not given to amp.initialize. Give all optimizers of this loss to one "
            "call of it."
        )
    return ApexLoss(engine, states, scaler, loss.float(), delay_unscale, delay_overflow_check)


def _engine_of(states: Sequence[OptimizerState]) -> Any:
    """The engine that the optimizers share; of optimizers that nobody manages the newest."""
    if not states:
        return state.loss_scalers[0].engine
    if any(found.engine is not states[0].engine for found in states):
        raise StateError(
            "amp.scale_loss: the optimizers were given to different calls of amp.initialize, which scale differently. "
            "Give all models and optimizers of one loss to one call."
        )
    return states[0].engine


class _Unscaled(contextlib.AbstractContextManager[torch.Tensor]):
    """A loss that is handed through; the casts of weights are dropped after its backward all the same."""

    def __init__(self, engine: ApexEngine, loss: torch.Tensor) -> None:
        self._engine = engine
        self._loss = loss

    def __enter__(self) -> torch.Tensor:
        return self._loss

    def __exit__(self, *_: object) -> None:
        self._engine.after_backward()


def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over what ``optimizer`` steps: at O2 and O5 the fp32 masters."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales of the newest ``initialize``: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The masters of O2 and O5 are in ``model.state_dict()``, exact and in fp32.

    Args:
        destination: filled and returned, where given.

    Raises:
        AttributeError: before ``initialize``.
    """
    filled = collections.OrderedDict() if destination is None else destination
    for index, scaler in enumerate(state.loss_scalers):
        filled[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return filled


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load what :func:`state_dict`, of any Apex, saved: one entry after the other into one loss scale after the other.

    Raises:
        RuntimeError: entries that belong to no loss scale; the others have been loaded. AttributeError: before
            ``initialize``.
    """
    scalers = state.loss_scalers
    if len(state_dict) != len(scalers):
        say("Warning: state_dict contains %d entries, while %d loss_scalers are used", len(state_dict), len(scalers))
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    entries = [value for key, value in state_dict.items() if "loss_scaler" in key]
    for scaler, entry in zip(scalers, entries, strict=False):
        scaler.load(float(entry["loss_scale"]), int(entry["unskipped"]))
    if len(entries) > len(scalers):
        say("Skipping loss_scaler[%d], since num_losses was set to %d", len(scalers), len(scalers))
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. ")
