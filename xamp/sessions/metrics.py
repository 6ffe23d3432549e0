"""The numbers of a session for a logger: loss scales, counts of steps, the last outcome, the norm of the gradients.

Nothing here runs in a training step. What a step leaves behind anyway is read: the records of
:class:`~xamp.scaling.counts.History`, the tensor that ``clip_grad_norm_`` returned, the gradients themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.ground import kernels
from xamp.ground.late_reads import LateNumber
from xamp.scaling.counts import StepOutcome
from xamp.scaling.step import OptimizerState

if TYPE_CHECKING:
    from xamp.scaling.engine import Engine

__all__ = ["collect", "known", "record_norm"]

# Optimizers that no session manages -> what clip_grad_norm_ last returned for them.
_norms: Any = WeakIdKeyDictionary()
# Engine -> readers of norms on the device, by the indices of the optimizers.
_readers: Any = WeakIdKeyDictionary()


def record_norm(optimizer: Optimizer, state: OptimizerState | None, norm: torch.Tensor) -> None:
    """Remember the norm that ``clip_grad_norm_`` has computed for ``optimizer``. Costs a reference."""
    if state is not None:
        state.norm = norm
    else:
        _norms[optimizer] = norm


def collect(
    engine: Engine | None, states: Sequence[OptimizerState], *, wait: bool, scale: float = 1.0, scaled: bool = False
) -> dict[str, float]:
    """Return the numbers of :meth:`Session.metrics`, seen from the optimizers of ``states``.

    ``scale`` is for a GradScaler without engine; ``scaled``: the gradients are still scaled, so their norm is wrong.
    """
    if engine is None:
        scales, applied, skipped, late = [scale], 0, 0, 0
    else:
        scales, outcomes = _scales(engine, wait), [state.outcomes for state in engine.states]
        late = 0 if wait else sum(each.uncounted - len(each.arrived()) for each in outcomes)
        applied, skipped = _counts(engine, wait)
    return {
        "loss_scale": scales[0],
        **{f"loss_scale_{index}": found for index, found in enumerate(scales[1:], 1)},
        "steps_applied": applied,
        "steps_skipped": skipped,
        "last_step_skipped": sum(_was_skipped(state, wait) for state in states),
        "grad_norm": math.nan if engine is None else _norm(engine, states, wait, scaled),
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
    fell = not engine.moves_before_step and any(engine.memory.overflowed(values, s.index) for s in engine.states)
    return [
        scaler.host_scale if at < scaler.set_at else scaler.rules.after_overflow(scale) if fell else scale
        for scaler, scale in zip(engine.scalers, found, strict=True)
    ]


def _is_on_host(scale: torch.Tensor) -> bool:
    return scale.is_cpu


def _counts(engine: Engine, wait: bool) -> tuple[int, int]:
    if wait or not engine.states:
        stats = engine.stats()
        return stats.applied, stats.skipped
    late = [engine.memory.overflowed(values, s.index) for s in engine.states for values in s.outcomes.arrived()]
    return engine.counts.applied + len(late) - sum(late), engine.counts.skipped + sum(late)


def _was_skipped(state: OptimizerState, wait: bool) -> bool:
    outcome = state.outcomes.last
    if isinstance(outcome, torch.Tensor) and not wait and not outcome.is_cpu:
        newest = state.outcomes.newest()
        return newest is not None and state.engine.memory.overflowed(newest[1], state.index)
    return state.outcomes.known() is StepOutcome.SKIPPED


def _norm(engine: Engine, states: Sequence[OptimizerState], wait: bool, scaled: bool) -> float:
    """Return the norm that the last ``clip_grad_norm_`` found; without one, that of the gradients there are now."""
    norm = _clipped_norm(states)
    norm = states[0].gradients.waiting_norm(2.0) if norm is None and len(states) == 1 else norm
    if norm is None:
        grads = [g for state in states if state.is_alive for p in state.gradients.stepped if (g := p.grad) is not None]
        busy = scaled or any(state.scope is not None or state.gradients.pending is not None for state in states)
        divided = ranks.is_divided(p for state in states for p in state.gradients.stepped)  # a logger is on one rank
        if busy or not grads or divided or any(type(g) is not torch.Tensor or g.is_sparse for g in grads):
            return math.nan
        norm = torch.nn.utils.get_total_norm(grads, foreach=kernels.foreach_of(grads))
    if wait:
        return float(norm)
    readers = _readers.setdefault(engine, {})
    return float(readers.setdefault(tuple(state.index for state in states), LateNumber()).read(norm))


def _clipped_norm(states: Sequence[OptimizerState]) -> torch.Tensor | None:
    """Return the norm over all of ``states``; None where it is not known of each."""
    known: dict[int, torch.Tensor] = {}
    for state in states:
        norm = state.norm if state.norm is not None or not state.is_alive else _norms.get(state.optimizer)
        if norm is None:
            return None
        known[id(norm)] = norm  # one call over several optimizers has one norm
    found = list(known.values())
    return found[0] if len(found) == 1 else torch.stack(found).norm() if found else None
