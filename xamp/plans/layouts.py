"""Which optimizers of torch step in one pass, by which rule, and the state that each keeps.

The state has the names, dtypes and places that torch's fused implementation gives it, so that a step of either can
follow one of the other, and a checkpoint moves between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from xamp import onepass
from xamp.onepass.rules import unread

__all__ = ["LAYOUTS", "OptimizerLayout", "make_states", "refusal", "rows_of"]

Group = Mapping[str, Any]


class OptimizerLayout(NamedTuple):
    """One class of optimizers.

    Attributes:
        rule: returns the rule that a group asks for; all groups must have one.
        keys: returns the names of the states that a group's parameters have, in the order of the rule.
        counts: each parameter has its count of steps in ``state["step"]``.
    """

    rule: Callable[[Group], onepass.Rule]
    keys: Callable[[Group], tuple[str, ...]]
    counts: bool


def _adam_rule(group: Group) -> onepass.Rule:
    return onepass.Rule("adam", decoupled=bool(group.get("decoupled_weight_decay")))


def _adam_keys(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


LAYOUTS: Mapping[type[Optimizer], OptimizerLayout] = {
    SGD: OptimizerLayout(lambda _: onepass.Rule("sgd"), lambda g: ("momentum_buffer",) * (g["momentum"] != 0), False),
    Adam: OptimizerLayout(_adam_rule, _adam_keys, counts=True),
    AdamW: OptimizerLayout(lambda _: onepass.Rule("adam", decoupled=True), _adam_keys, counts=True),
}
"""By class. A class derived from one of these may step otherwise, and is not taken for it."""


def refusal(kind: type[Optimizer], optimizer: Optimizer) -> str:
    """Return why ``optimizer``, of class ``kind`` before it was managed, cannot step in one pass; empty if it can."""
    layout = LAYOUTS.get(kind)
    if layout is None:
        return f"{kind.__name__} has no kernel; {', '.join(one.__name__ for one in LAYOUTS)} of torch.optim have"
    groups = optimizer.param_groups
    if any(group.get("foreach") or group.get("differentiable") for group in groups):
        return "it was made with foreach=True or differentiable=True"
    if len({layout.rule(group) for group in groups}) > 1:
        return "its groups disagree on decoupled_weight_decay"
    for group in groups:
        if group["params"] and (why := unread(group, group["params"][0].device)):
            return why
    return ""


def rows_of(
    kind: type[Optimizer],
    optimizer: Optimizer,
    params: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    begun: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[onepass.Row], list[int]]:
    """Return the rows of those of ``params`` whose state exists, and their places in ``params``.

    Args:
        kind: the class of the optimizer.
        optimizer: the optimizer.
        params: what is stepped, with the low-precision parameter into which the result is written too, if any.
        begun: see :data:`xamp.plans.steps.Begun`. It tells the first step, of a state that has no count.
    """
    layout, rows, places = LAYOUTS[kind], [], []
    groups = optimizer.param_groups
    numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    for place, (param, low) in enumerate(params):
        number, state = numbers.get(id(param)), optimizer.state.get(param, {})
        if number is None:  # a script has taken it out of the groups
            continue
        states = [state[key] for key in layout.keys(groups[number]) if isinstance(state.get(key), torch.Tensor)]
        momentum, first = begun.get(id(param), (None, None))
        count = state.get("step") if layout.counts else first if states and states[0] is momentum else None
        if len(states) == len(layout.keys(groups[number])) and (count is not None or not layout.counts):
            rows.append(onepass.Row(param, low, tuple(states), count, number, in_place=low is None))
            places.append(place)
    return rows, places


def make_states(
    kind: type[Optimizer],
    optimizer: Optimizer,
    params: Iterable[torch.Tensor],
    counter_device: Callable[[Group, torch.Tensor], torch.device],
    begin: Callable[[torch.Tensor, Mapping[str, Any]], None],
) -> None:
    """Make the state that torch makes at the first step of ``params``, in its order.

    Args:
        kind: the class of the optimizer.
        optimizer: the optimizer.
        params: parameters without state.
        counter_device: says where the count of steps of a group's parameter belongs.
        begin: is told of a parameter and its state before the optimizer has it.
    """
    layout, new = LAYOUTS[kind], set(map(id, params))
    held = ((group, param) for group in optimizer.param_groups for param in group["params"])
    for group, param in held:
        if id(param) not in new:
            continue
        state: dict[str, Any] = {}
        if layout.counts:
            state["step"] = torch.zeros((), dtype=torch.float32, device=counter_device(group, param))
        for key in layout.keys(group):
            state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        begin(param, state)
        optimizer.state[param].update(state)
