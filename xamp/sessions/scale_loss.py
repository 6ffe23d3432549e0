"""The call around each backward: ``scale_loss``. What it scales by: ``loss_scale``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.distributed import ddp, ranks
from xamp.errors import PolicyError, StateError
from xamp.scaling import masters
from xamp.scaling.block import Block, step_in, step_out
from xamp.scaling.engine import Engine
from xamp.scaling.optimizer import managed_by
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState
from xamp.sessions.session import find_session, managed, the_engine
from xamp.torch_compat.compiler import eager_by_rule, keep_eager
from xamp.values.lowered import handed_out
from xamp.values.shown import shown

__all__ = ["loss_scale", "scale_loss"]


@keep_eager  # and traced where it is a part of a graph, which then breaks once, on entering the block
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale a loss, and unscale the gradients of its backward.

    ::

        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    At the end of the ``with`` block xamp unscales the gradients of ``optimizers`` (at O2 and O5 they are then in the
    masters' ``.grad``) and checks them for inf and nan. The loss scale moves at the next ``optimizer.step()``, once for
    all micro-batches of the step. All of this runs on the device. Where a wrapper postpones its reduction of the
    gradients (``no_sync``), unscaling and check wait for the first ``scale_loss`` whose backward reduces.

    A stage of a pipeline, where the schedule runs backward and only the last stage has a loss, gives a one:
    ``torch.ones((), device=device)``. The result is the loss scale, by which the last stage multiplies its losses.

    Args:
        loss: a floating tensor of one element, on the session's device type.
        optimizers: the optimizer, or a list of all optimizers, whose parameters get gradients from ``loss``.
        loss_id: index of the loss scale to use, below the ``num_losses`` of ``initialize``.
        model: the DistributedDataParallel around the model. Needed only where xamp cannot see it run, because all of it
            is compiled.
        delay_unscale: leave the gradients scaled; a later ``scale_loss`` unscales them together with its own.
        delay_overflow_check: unscale the gradients, but ignore an overflow of this backward: neither skip the step nor
            move the scale by it.

    Returns:
        A context manager that yields the scaled loss, fp32.

    Raises:
        PolicyError: the loss or ``loss_id`` cannot be right; or ranks that share the model were given other settings.
        StateError: no session manages an optimizer, or the optimizers belong to different sessions; or another rank
            that shares the model does not come here.
    """
    states, engine = _states_of("scale_loss", optimizers)
    if handed_out:
        engine.settle()
    if model is not None:
        ddp.note_given(model)
    if not engine.enabled:
        return _unscaled(loss, engine, optimizers)
    _check_loss(loss, engine)
    scaler = _scaler_of("scale_loss", engine, loss_id)
    block = Block(states, scaler, delay_unscale, delay_overflow_check)
    if loss.dtype in masters.LOWER:
        loss = loss.float()
    if not engine.policy.manages_gradients:
        return _unscaled(loss, engine, optimizers, engine.blocks.regions)
    return engine.scale_loss(loss, block, optimizers)


def _unscaled(
    loss: torch.Tensor, engine: Engine, optimizers: Optimizer | Sequence[Optimizer], regions: Any = None
) -> _Unscaled:
    if ranks.is_running() and not engine.fellows.is_compared:
        given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        engine.compare_settings([p for one in given for group in one.param_groups for p in group["params"]])
    return _Unscaled(loss, regions)


class _Unscaled:
    """Yields a loss as it is, outside of the regions of the code around; a disabled session gives no ``regions``."""

    __slots__ = ("_left", "_loss", "_regions")

    def __init__(self, loss: torch.Tensor, regions: Any) -> None:
        self._loss, self._regions, self._left = loss, regions, None

    @eager_by_rule
    def __enter__(self) -> torch.Tensor:
        if self._regions is not None:
            self._left = step_out(self._regions)
        return self._loss

    @eager_by_rule
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object) -> None:
        if self._regions is None:
            return
        step_in(self._regions, self._left)
        if isinstance(error, Exception):
            self._regions().explain(error)


def _scaler_of(call: str, engine: Engine, loss_id: object) -> LossScaler:
    """Return the scaler of ``loss_id``, or raise a PolicyError where there is none."""
    scalers = engine.scalers
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise PolicyError(
            f"{call}(loss_id={shown(loss_id)}): initialize was called with num_losses={engine.policy.num_losses}, so "
            f"loss_id is one of 0 to {len(scalers) - 1}. Raise num_losses there."
        )
    return scalers[loss_id]


def _check_loss(loss: object, engine: Engine) -> None:
    if not isinstance(loss, torch.Tensor) or not loss.dtype.is_floating_point or loss.numel() != 1:
        shown = f"{loss.dtype}, shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PolicyError(
            f"scale_loss(loss): the loss must be one floating element, and is {shown}. Reduce it first, as with "
            "loss.mean()."
        )
    if loss.device != engine.device and loss.device.type != engine.device.type:
        raise PolicyError(
            f"scale_loss(loss): the loss is on {loss.device}, the model on {engine.device}. Compute the loss where the "
            "model is."
        )


def _states_of(call: str, optimizers: object) -> tuple[list[OptimizerState], Engine]:
    only = managed_by(optimizers) or managed_by(managed(optimizers))
    if only is not None:
        return [only.state], only.engine
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise StateError(f"{call}: no optimizer given. Pass all whose parameters get gradients from this loss.")
    given = [managed(optimizer) for optimizer in given]
    owners = [None if (found := find_session(optimizer)) is None else found.engine for optimizer in given]
    for optimizer, owner in zip(given, owners, strict=True):
        if owner is None or (owner.enabled and not owner.serves(optimizer)):
            raise StateError(
                f"{call}: {type(optimizer).__name__} was not given to xamp.initialize as an optimizer, or its session "
                "was closed. Call model, optimizer = xamp.initialize(model, optimizer, level=...) first."
            )
    if any(owner is not owners[0] for owner in owners):
        raise StateError(
            f"{call}: the optimizers belong to different sessions, which scale differently. Give all models and "
            "optimizers of one loss to one xamp.initialize call."
        )
    found_states = [own.state for optimizer in given if (own := managed_by(optimizer)) is not None]
    return list({id(state): state for state in found_states}.values()), owners[0]  # type: ignore[return-value]


def loss_scale(obj: object = None, loss_id: int = 0) -> float:
    """Return the loss scale; 1.0 for a disabled session. Waits for the device.

    Args:
        obj: a model or optimizer; None where only one session is live.
        loss_id: index of the loss scale in the session.

    Raises:
        StateError: there is no session, or there are several and ``obj`` is None.
        PolicyError: ``loss_id`` is out of range.
    """
    found = the_engine("loss_scale", obj)
    if not found.enabled:
        return 1.0
    return float(_scaler_of("loss_scale", found, loss_id).scale)
