"""Whether the last step of a model was skipped, without waiting for the device where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from xamp.scaling.counts import StepOutcome
from xamp.scaling.step import OptimizerState
from xamp.sessions.session import find_session, session

__all__ = ["was_skipped"]


def was_skipped(source: Any, model: nn.Module, params: Sequence[torch.Tensor]) -> bool | torch.Tensor:
    """Return whether the last step was skipped: of several optimizers, whether each skipped it.

    Args:
        source: whose outcome counts: a GradScaler or a managed optimizer; True: that of the session of ``model``; None:
            the same where it has a session, and where it has none no step was skipped.
        model: the model.
        params: its parameters. Optimizers that hold none of them do not count, unless ``source`` names what counts.

    Returns:
        A bool, or a flag of one element on the device (1.0: skipped) where the host would have to wait for it.

    Raises:
        StateError: ``source`` is managed by no session.
    """
    states = _states(source, model)
    if source is None or source is True:
        held = set(map(id, params))
        states = [each for each in states if any(id(p) in held for p in each.gradients.model_params())]
    flags: list[torch.Tensor] = []
    for state in states:
        last = state.outcomes.last
        if isinstance(last, torch.Tensor) and not last.is_cpu:
            flags.append(last)
        elif state.outcomes.known() is not StepOutcome.SKIPPED:
            return False
    if not flags:
        return len(states) > 0
    return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).min()


def _states(source: Any, model: nn.Module) -> list[OptimizerState]:
    if source is None:
        found = find_session(model)
        engine: Any = None if found is None else found.engine
    elif hasattr(source, "_engine"):  # a GradScaler, before its first loss without an engine
        engine = source._engine
    else:
        engine = session(model if source is True else source).engine
    return [] if engine is None else [state for state in engine.states if state.is_alive]
