"""The numbers of a session for a logger: loss scales, counts of steps, the last outcome, the norm of the gradients.

Nothing here runs in a training step. What a step leaves behind anyway is read: the records of
:class:`~xamp.scaling.counts.History`, the tensor that ``clip_grad_norm_`` returned, the gradients themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.scaling.block import outside
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.step import OptimizerState
from xamp.torch_compat import kernels
from xamp.values.late_reads import LateNumber

if TYPE_CHECKING:
    from xamp.scaling.engine import Engine

__all__ = [
    "collect",
    "forget_number",
    "known",
    "late_number",
    "norm_of",
    "norm_of_held",
    "norm_over",
    "numbers",
    "record_norm",
    "recorded_norm",
]

# Optimizer -> what clip_grad_norm_ last returned for them.
_norms: Any = WeakIdKeyDictionary()
# Engine, or what a GradScaler knows of its steps -> readers of numbers on the device, by name.
_readers: Any = WeakIdKeyDictionary()


def record_norm(optimizer: Optimizer, norm: torch.Tensor) -> None:
    """Remember the norm that ``clip_grad_norm_`` has computed for ``optimizer``. Costs a reference."""
    _norms[optimizer] = norm


def recorded_norm(optimizer: Optimizer | None) -> torch.Tensor | None:
    """Return the norm that ``clip_grad_norm_`` last returned for ``optimizer``; None: nothing yet."""
    found: torch.Tensor | None = None if optimizer is None else _norms.get(optimizer)
    return found


def collect(engine: Engine, states: Sequence[OptimizerState], *, wait: bool) -> dict[str, float]:
    """Return the numbers of :meth:`Session.metrics`, seen from the optimizers of ``states``."""
    scales, outcomes = _scales(engine, wait), [state.outcomes for state in engine.states]
    late = 0 if wait else sum(each.uncounted - len(each.arrived()) for each in outcomes)
    skipped = sum(_was_skipped(engine, state, wait) for state in states)
    return numbers(scales, Stats(*_counts(engine, wait)), skipped, _norm(engine, states, wait), late)


def numbers(scales: Sequence[float], stats: Stats, last_skipped: int, norm: float, late: int) -> dict[str, float]:
    """Return the numbers under their names, which are the same for sessions and for a ``GradScaler``."""
    return {
        "loss_scale": scales[0],
        **{f"loss_scale_{index}": found for index, found in enumerate(scales[1:], 1)},
        "steps_applied": stats.applied,
        "steps_skipped": stats.skipped,
        "last_step_skipped": last_skipped,
        "grad_norm": norm,
        "steps_late": late,
    }


def known(engine: Engine) -> tuple[list[float], int, int]:
    """Return the loss scales and the numbers of applied and of skipped steps, as far as the host knows them."""
    return _scales(engine, False), *_counts(engine, False)


def _scales(engine: Engine, wait: bool) -> list[float]:
    """Return the loss scales: as they are now, or on a device that is not waited for as they were at a recent step."""
    if not engine.enabled or not engine.scalers:
        return [1.0]
    if wait or not engine.states or _is_on_host(engine.scalers[0].scale):  # a session of a real apex.amp has no states
        return [float(scaler.scale) for scaler in engine.scalers]
    known = [newest for state in engine.states if (newest := state.outcomes.newest()) is not None]
    if not known or not engine.policy.dynamic:
        return [scaler.host_scale for scaler in engine.scalers]
    at, values = max(known, key=lambda newest: newest[0])  # an optimizer that rests knows old scales only
    found = engine.memory.scales_in(values)
    return [
        scaler.host_scale if at < scaler.set_at else scale for scaler, scale in zip(engine.scalers, found, strict=True)
    ]


def _is_on_host(scale: torch.Tensor) -> bool:
    return scale.is_cpu


def _counts(engine: Engine, wait: bool) -> tuple[int, int]:
    if wait or not engine.states:
        stats = engine.stats()
        return stats.applied, stats.skipped
    late = [engine.memory.overflowed(values, s.index) for s in engine.states for values in s.outcomes.arrived()]
    counted = engine.counts.stats
    return counted.applied + len(late) - sum(late), counted.skipped + sum(late)


def _was_skipped(engine: Engine, state: OptimizerState, wait: bool) -> bool:
    outcome = state.outcomes.last
    if isinstance(outcome, torch.Tensor) and not wait and not outcome.is_cpu:
        newest = state.outcomes.newest()
        return newest is not None and engine.memory.overflowed(newest[1], state.index)
    return state.outcomes.known() is StepOutcome.SKIPPED


def _norm(engine: Engine, states: Sequence[OptimizerState], wait: bool) -> float:
    """Return the norm that the last ``clip_grad_norm_`` found; without one, that of the gradients there are now."""
    norm = norm_over(state.optimizer if state.is_alive else None for state in states)
    norm = norm_of_held(states, 2.0) if norm is None else norm
    params = [param for state in states if state.is_alive for param in state.gradients.params.stepped]
    is_open = bool(engine.blocks.overlapping(states))
    busy = is_open or any(state.gradients.pending or state.gradients.held for state in states)
    with outside(engine.blocks.regions):
        return norm_of(engine, tuple(state.index for state in states), norm, params, wait=wait, busy=busy)


def norm_over(optimizers: Iterable[Optimizer | None]) -> torch.Tensor | None:
    """Return the norm over ``optimizers`` that ``clip_grad_norm_`` has found; None where it is not known of each."""
    known = [recorded_norm(optimizer) for optimizer in optimizers]
    found = [norm for norm in {id(norm): norm for norm in known}.values() if norm is not None]  # one call has one norm
    if not found or any(norm is None for norm in known):
        return None
    return found[0] if len(found) == 1 else torch.stack(found).norm()


def norm_of_held(states: Iterable[OptimizerState | None], norm_type: Any) -> torch.Tensor | None:
    """Return the norm over gradients that are held for steps in one pass, by the kernels; None where not all are."""
    norms: list[torch.Tensor] = []
    for state in states:
        norm = None if state is None else state.gradients.held_norm(norm_type)
        if norm is None:
            return None
        norms.append(norm)
    if len(norms) <= 1:
        return norms[0] if norms else None
    first = norms[0].device
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(first) for each in norms]), float(norm_type))
    return whole


def norm_of(
    owner: object, reader: object, norm: torch.Tensor | None, params: Sequence[torch.Tensor], *, wait: bool, busy: bool
) -> float:
    """Return ``norm``, or without one that of the gradients of ``params``; nan where these are scaled or in parts.

    ``busy``: they are scaled, or a backward runs. ``owner``, ``reader`` and ``wait``: see :func:`late_number`.
    """
    if norm is None:
        grads = [grad for param in params if (grad := param.grad) is not None]
        if busy or not grads or ranks.is_divided(params):  # a logger is on one rank
            return math.nan
        if any(type(grad) is not torch.Tensor or grad.is_sparse for grad in grads):
            return math.nan
        norm = torch.nn.utils.get_total_norm(grads, foreach=kernels.foreach_of(grads))
    return late_number(owner, reader, norm, wait)


def late_number(owner: object, reader: object, number: Any, wait: bool) -> float:
    """Return ``number``, which may be on the device: as it is now (``wait``), or the newest value that has arrived.

    ``reader`` tells the numbers of ``owner`` apart: each has arrived from an earlier call with the same one.
    """
    if wait or not isinstance(number, torch.Tensor):
        return float(number)
    return _readers.setdefault(owner, {}).setdefault(reader, LateNumber()).read(number)  # type: ignore[no-any-return]


def forget_number(owner: object, reader: object) -> None:
    """Let the next :func:`late_number` wait for the number as it is then: the host has set it."""
    _readers.get(owner, {}).pop(reader, None)
