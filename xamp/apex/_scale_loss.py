"""``amp.scale_loss``, and the functions that save and load the loss scales."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.apex._amp_state import _amp_state as state
from xamp.apex._amp_state import master_params
from xamp.apex._engine import ApexEngine
from xamp.apex._several import LossOfSeveralCalls
from xamp.errors import StateError
from xamp.scaling.block import Block, ScaledLoss, step_in, step_out
from xamp.scaling.optimizer import Managed, managed_by
from xamp.sessions import scale_loss as of_sessions
from xamp.torch_compat.compiler import eager_by_rule, keep_eager
from xamp.values.log import say

__all__ = ["load_state_dict", "master_params", "scale_loss", "state_dict"]


@keep_eager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale a loss. On leaving the block, unscale the gradients of its backward, and update the loss scale.

    If a gradient is not finite under a dynamic scale, every optimizer given here skips its next step.

    Args:
        loss: the loss; it may have more than one element.
        optimizers: all optimizers whose parameters get gradients from the loss, or the only one.
        loss_id: the index of the loss scale, among the ``num_losses`` that ``initialize`` made.
        model: not used, as in Apex.
        delay_unscale: leave the gradients scaled; a later call unscales them together with its own.
        delay_overflow_check: unscale, but ignore an overflow of this backward: skip no step and keep the scale.

    Returns:
        A context manager that yields the scaled loss, fp32.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with these optimizers.
        IndexError: there is no such loss scale.
    """
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    states = [found for optimizer in given if (found := managed_by(optimizer)) is not None]
    if not states and not hasattr(state, "opt_properties"):
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
        )
    if not states and not state.opt_properties.enabled:
        return contextlib.nullcontext(loss)
    engines: dict[int, Any] = {id(found.engine): found.engine for found in states}
    if not all(isinstance(engine, ApexEngine) for engine in engines.values()):  # of xamp.initialize
        return of_sessions.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)
    if len(engines) > 1:
        if len(states) < len(given):
            raise _not_given()
        return _of_several_calls(states, loss.float(), loss_id, delay_unscale, delay_overflow_check)
    engine = next(iter(engines.values()), None) or state.loss_scalers[0].engine
    scaler = engine.scalers[loss_id]
    if not engine.has_work(scaler):
        return _Unscaled(engine, loss.float())
    if len(states) < len(given):
        raise _not_given()
    block = Block([found.state for found in states], scaler, delay_unscale, delay_overflow_check)
    return ScaledLoss(engine, block, loss.float())


def _not_given() -> StateError:
    return StateError(
        "amp.scale_loss: an optimizer was not given to amp.initialize. Give all optimizers of this loss to one call of "
        "it."
    )


def _of_several_calls(
    states: Sequence[Managed], loss: torch.Tensor, loss_id: int, *delays: bool
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """The loss of optimizers of several calls of ``initialize``, whose engines follow the newest, as in Apex."""
    parts: dict[int, tuple[Any, list[Any]]] = {}
    for found in states:
        parts.setdefault(id(found.engine), (found.engine, []))[1].append(found.state)
    oldest_first = sorted(parts.values(), key=lambda part: part[0].number)
    oldest_first[-1][0].scalers[loss_id]  # raises an IndexError where there is no such loss scale
    return LossOfSeveralCalls(oldest_first, loss, loss_id, *delays)


class _Unscaled(contextlib.AbstractContextManager[torch.Tensor]):
    """The context manager for a loss that needs no scale: it yields the loss, and at the end drops casts of weights."""

    def __init__(self, engine: ApexEngine, loss: torch.Tensor) -> None:
        self._engine = engine
        self._loss = loss

    @eager_by_rule
    def __enter__(self) -> torch.Tensor:
        self._left = step_out(self._engine.blocks.regions)
        return self._loss

    @eager_by_rule
    def __exit__(self, *_: object) -> None:
        step_in(self._engine.blocks.regions, self._left)
        self._engine.after_backward()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales of the newest ``initialize``: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The masters of O2 and O5 are in ``model.state_dict()``, exact and in fp32.

    Args:
        destination: a dict to fill and return; None makes a new one.

    Raises:
        AttributeError: ``initialize`` was not called.
    """
    filled = collections.OrderedDict() if destination is None else destination
    for index, scaler in enumerate(state.loss_scalers):
        filled[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return filled


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load what :func:`state_dict` of any Apex saved: the entries go into the loss scales in order.

    Raises:
        RuntimeError: some entries belong to no loss scale; the other entries have been loaded.
        AttributeError: ``initialize`` was not called.
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
