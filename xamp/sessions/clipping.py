"""The gradients and tensors that an optimizer will step: ``master_params``, ``master_of``, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from xamp.distributed import ranks
from xamp.errors import PolicyError, StateError
from xamp.scaling import masters, unscale
from xamp.scaling.block import outside
from xamp.scaling.gradients import optimizer_of
from xamp.scaling.optimizer import bring_gradients, lent_params, managed_by, state_of
from xamp.sessions import metrics
from xamp.sessions.session import find_session, managed
from xamp.torch_compat import kernels
from xamp.torch_compat.compiler import eager_by_rule
from xamp.values.arguments import boolean, number, number_or_tensor
from xamp.values.shown import shown

__all__ = ["clip_grad_norm_", "clip_grad_value_", "master_of", "master_params"]


@eager_by_rule
def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that ``optimizer`` steps: the fp32 masters at O2 and O5, else the parameters.

    Raises:
        StateError: the gradients are still scaled, so it would be wrong to clip or read them now.
    """
    return lent_params(_optimizer_in(optimizer, "master_params"), "master_params(optimizer)")


@eager_by_rule
def master_of(param: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is stepped for ``param``, a parameter of a model: its fp32 master, or ``param`` itself.

    ::

        with torch.no_grad():  # the norm of the gradient of each layer, at every level
            norms = {name: xamp.master_of(p).grad.norm() for name, p in model.named_parameters()}

    Between ``scale_loss`` and the step its ``.grad`` is the unscaled gradient. A model follows what is written into its
    masters, at its next forward.

    Raises:
        StateError: ``param`` is no tensor; the gradients are still scaled, so it would be wrong to read them now.
    """
    call = "master_of(param)"
    if not isinstance(param, torch.Tensor):
        raise StateError(
            f"{call}: must be given a parameter of a model, such as model.fc.weight, and is {shown(param)}."
        )
    if masters.master_of(param) is None:
        return param
    bring_gradients(optimizer_of(param), call)
    return masters.exact(param)


def _optimizer_in(optimizer: Any, call: str) -> Optimizer:
    """Return ``optimizer``, or the managed one within, or raise a StateError: ``call`` must be given one."""
    optimizer = managed(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise StateError(f"{call}({type(optimizer).__name__}): must be given an optimizer.")
    return optimizer


@eager_by_rule
def clip_grad_norm_(
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the norm of all gradients that ``optimizer`` will apply, in place, without waiting for the device.

    Where parameters are sharded (FSDP1, FSDP2, DTensor), some or all of them, the norm is that of the whole gradients,
    the same on every rank, and every rank must call this.

    Args:
        optimizer: one optimizer, or several whose gradients count as one vector.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm; may be inf.
        error_if_nonfinite: raise where the norm is inf or nan and the step would be taken with it. Where an overflow
            will skip the step anyway, nothing is raised, so that the loss scale can fall. Waits for the device.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        StateError: the gradients are still scaled; or FSDP1 shards them, and ``initialize`` was not given its module;
            or ``error_if_nonfinite``, and then no gradient was clipped.
        PolicyError: ``max_norm`` or ``norm_type`` is no number.
    """
    max_norm, norm_type = number_or_tensor("max_norm", max_norm), number_or_tensor("norm_type", norm_type)
    check = boolean("error_if_nonfinite", error_if_nonfinite, call="clip_grad_norm_")
    call = "clip_grad_norm_(optimizer)"
    given = _read_gradients(optimizer, call)
    own = next(filter(None, map(managed_by, given)), None)
    with outside(None if own is None else own.engine.blocks.regions):  # which change norms of 16-bit gradients
        norm = _clip(given, call, max_norm, norm_type, check)
    for one in given:
        metrics.record_norm(one, norm)
    return norm


def _clip(given: Sequence[Optimizer], call: str, max_norm: float, norm_type: float, check: bool | None) -> torch.Tensor:
    norm = metrics.norm_of_held(map(state_of, given), norm_type)
    if norm is not None:
        _refuse_nonfinite(check, norm_type, given, norm)
        with _writing(given, call):
            _clip_held(given, max_norm, norm)
    else:
        held = [(one, param) for one in given for param in lent_params(one, call)]
        params = [param for _, param in held]
        grads = [param.grad for param in params if param.grad is not None]
        in_lists, divided = kernels.foreach_of(grads), ranks.is_divided(params)
        norm = _norm_of_parts(held, norm_type) if divided else get_total_norm(grads, norm_type, foreach=in_lists)
        _refuse_nonfinite(check, norm_type, given, norm)
        with _writing(given, call):
            if divided:
                _clip_parts(grads, max_norm, norm)
            else:
                clip_grads_with_norm_(params, max_norm, norm, foreach=in_lists)
    return norm


def _read_gradients(optimizer: Any, call: str) -> list[Optimizer]:
    """Return the optimizers that ``call`` was given, after what was done to their gradients was taken in.

    Raises:
        StateError: those of one cannot be read now.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = [_optimizer_in(one, call.partition("(")[0]) for one in given]
    for one in found:
        if (own := managed_by(one)) is not None:
            own.engine.begin_reading(own.state, call)
            own.engine.mark.end()
    return found


class _writing:  # a function of contextlib would end the mark after an exception, too
    """Marks the sessions of some optimizers while ``call`` writes their gradients; an exception leaves the marks."""

    def __init__(self, given: Sequence[Optimizer], call: str) -> None:
        found = [own.engine.mark for one in given if (own := managed_by(one)) is not None]
        self._marks = list(dict.fromkeys(found))
        self._call = call

    def __enter__(self) -> None:
        for mark in self._marks:
            mark.begin(self._call)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for mark in self._marks if kind is None else ():
            mark.end()


def _clip_held(given: Sequence[Optimizer], max_norm: Any, norm: torch.Tensor) -> None:
    for one in given:
        if (state := state_of(one)) is not None:
            state.gradients.clip_held(norm, max_norm)


def _norm_of_parts(held: Sequence[tuple[Any, torch.Tensor]], norm_type: float) -> torch.Tensor:
    """Return the norm of the whole gradients of parameters, each of which stands behind its optimizer."""
    found = ((find_session(one), param) for one, param in held)
    layouts = [(p, ranks.layout_of(p) if own is None else own.engine.fellows.layout(p)) for own, p in found]
    return unscale.total_norm(layouts, norm_type)


def _clip_parts(grads: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    unscale.multiply_(grads, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))  # torch's rule


def _refuse_nonfinite(check: bool | None, norm_type: float, given: Sequence[Optimizer], norm: torch.Tensor) -> None:
    """If ``check``, raise a StateError where ``norm`` is inf or nan, and none of the optimizers will skip its step."""
    states = [state for one in given if (state := state_of(one)) is not None]
    if not check or math.isfinite(float(norm)) or any(bool(state.overflowed_since_step) for state in states):
        return
    raise StateError(
        f"clip_grad_norm_(error_if_nonfinite=True): the {norm_type}-norm of the gradients is {float(norm)}, and the "
        "step would be taken. No gradient was clipped. Look for the first non-finite value with `with "
        'xamp.debug.find_nonfinite(model, optimizer) as found:`, or pass on_static_overflow="skip" to '
        "xamp.initialize, which then skips such steps."
    )


@eager_by_rule
def clip_grad_value_(optimizer: Optimizer | Sequence[Optimizer], clip_value: float) -> None:
    """Clip each element of the gradients that ``optimizer`` will apply to at most ``clip_value`` in size, in place.

    Does not wait for the device. At O2 and O5 it clips the gradients of the fp32 masters. A step that overflowed is
    skipped all the same: its inf was seen before it was clipped. Sharded gradients are clipped on the rank that has
    them; where parameters are DTensors, every rank must call this.

    Args:
        optimizer: one optimizer, or several.
        clip_value: the largest size allowed, of the unscaled gradients; 0 or more.

    Raises:
        StateError: the gradients are still scaled.
        PolicyError: ``clip_value`` is no such number.
    """
    limit = number("clip_value", clip_value, call="clip_grad_value_")
    if limit < 0:
        raise PolicyError(f"clip_grad_value_(clip_value={shown(clip_value)}): must be a number, 0 or above.")
    call = "clip_grad_value_(optimizer)"
    given = _read_gradients(optimizer, call)
    params = [param for one in given for param in lent_params(one, call)]
    whole = [p for p in params if p.grad is not None and not ranks.is_dtensor(p)]
    with _writing(given, call):
        if whole:  # torch does not take an empty list
            torch.nn.utils.clip_grad_value_(whole, limit)
        for param in params:
            if ranks.is_dtensor(param) and param.grad is not None:
                param.grad = ranks.whole_sum(param.grad)  # a limit is for the sum, and not for each summand
                ranks.local(param.grad).clamp_(-limit, limit)
