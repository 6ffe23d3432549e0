"""The plan of one optimizer, over its masters and the parameters that it steps as they are."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.onepass.rules import unread
from xamp.plans import layouts
from xamp.plans.graphs import begin_in_graph

__all__ = ["Plans", "hyper_of"]

Grads = Sequence["torch.Tensor | None"]
Params = Sequence[tuple[torch.Tensor, "torch.Tensor | None"]]
NewPlan = Callable[[onepass.Rule, Sequence[onepass.Row]], onepass.Plan]
Begun = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a parameter: the momentum that was made for it, and its count of steps."""


_VALUES = operator.methodcaller("values")


class _Kept:
    """A plan over those parameters of an optimizer that have their state, with what tells that it is out of date.

    Attributes:
        plan: None where no parameter has its state yet.

    Raises:
        ValueError: the kernels do not take one of the tensors.
    """

    def __init__(
        self, kind: type[Optimizer], optimizer: Optimizer, params: Params, begun: Begun, new_plan: NewPlan
    ) -> None:
        rows, self._places = layouts.rows_of(kind, optimizer, params, begun)
        self._left_out = sorted(set(range(len(params))) - set(self._places))
        self._held, self._asked = _held(optimizer), _asked(kind, optimizer)
        self._kind = kind
        rule = layouts.LAYOUTS[kind].rule(optimizer.param_groups[0])
        self.plan = new_plan(rule, rows) if rows else None

    def is_stale(self, optimizer: Optimizer) -> bool:
        """Return whether a tensor was replaced in the state, or lies elsewhere, or a group asks for another rule."""
        held = _held(optimizer)
        same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        asks = self._asked == _asked(self._kind, optimizer)
        return not (same and asks) or (self.plan is not None and self.plan.moved())

    def left_out(self, grads: Grads) -> list[int]:
        """Return the places of parameters that have a gradient and no row, for they have no state."""
        return [place for place in self._left_out if grads[place] is not None]

    def of(self, grads: Grads) -> Grads:
        """Return those of ``grads`` for which there are rows."""
        return [grads[place] for place in self._places] if self._left_out else grads


def _held(optimizer: Optimizer) -> list[Any]:
    return [*itertools.chain.from_iterable(map(_VALUES, optimizer.state.values()))]


def _asked(kind: type[Optimizer], optimizer: Optimizer) -> list[tuple[onepass.Rule, tuple[str, ...]]]:
    """Return the rule and the states that each group asks for: a script may change a momentum in place."""
    layout = layouts.LAYOUTS[kind]
    return [(layout.rule(group), layout.keys(group)) for group in optimizer.param_groups]


class Plans:
    """The plan of one optimizer, made again where something has moved.

    Gradients are given in the order of the masters, and then of the other parameters.

    Args:
        kind: the class of the optimizer before it was managed.
        masters: masters, each with its low-precision parameter.
        others: what is stepped besides. Its gradients are on the model too, so they are unscaled and clipped in place.
        new_plan: makes a plan of a rule over rows.
    """

    def __init__(
        self, kind: type[Optimizer], masters: Params, others: Sequence[torch.Tensor], new_plan: NewPlan
    ) -> None:
        self._kind, self._new_plan = kind, new_plan
        self._params: Params = [*masters, *((param, None) for param in others)]
        self._kept: _Kept | None = None
        self._begun: Begun = {}
        self._bare: onepass.Plan | None = None  # of parameters that have no state yet: it checks
        self._hyper: tuple[list[Any], list[type], Sequence[Mapping[str, Any]]] = [], [], ()  # what the groups ask for

    def _current(self, optimizer: Optimizer, *, steps: bool) -> _Kept:
        """Return what is kept of the plan, up to date where it ``steps``. Raises ValueError: see :class:`_Kept`."""
        if self._kept is None or (steps and self._kept.is_stale(optimizer)):
            held = {id(tensor) for tensor in _held(optimizer)}
            self._begun = {key: value for key, value in self._begun.items() if id(value[0]) in held}
            self._kept = None  # it holds memory that the next one may need
            self._kept = _Kept(self._kind, optimizer, self._params, self._begun, self._new_plan)
        return self._kept

    def clear(self) -> None:
        """Forget the plans: they hold the optimizer's state."""
        self._kept, self._begun, self._bare = None, {}, None

    def begin_in_graph(self, optimizer: Optimizer, grads: Grads) -> bool:
        """Make the plan ready for the graph that is being captured; return whether it is there and takes ``grads``.

        Nothing can be made in a capture, so an optimizer has to have stepped with these parameters before.
        """
        kept = self._kept
        if kept is None or kept.plan is None or kept.is_stale(optimizer) or kept.left_out(grads):
            return False
        return begin_in_graph(kept.plan, optimizer)

    def stepper(self, optimizer: Optimizer, grads: Grads) -> tuple[onepass.Plan, Grads]:
        """Return the plan of a step, and those of ``grads`` for which it has rows.

        Raises:
            ValueError: see :class:`_Kept`; or no parameter has its state.
        """
        kept = self._current(optimizer, steps=True)
        if kept.plan is None:
            raise ValueError("no parameter has its state")
        return kept.plan, kept.of(grads)

    def checker(self, optimizer: Optimizer, grads: Grads, *, steps: bool = False) -> tuple[onepass.Plan, Grads]:
        """Return a plan that reads every gradient, and the gradients in its order. Raises as :meth:`stepper`.

        Where it ``steps`` by it too, all tensors lie where the plan says; a check reads nothing but gradients.
        """
        kept = self._current(optimizer, steps=steps)
        if kept.plan is not None and not kept.left_out(grads):
            return kept.plan, kept.of(grads)
        if self._bare is None:
            rows = [onepass.Row(param, low, in_place=low is None) for param, low in self._params]
            self._bare = self._new_plan(onepass.Rule("sgd"), rows)
        return self._bare, grads

    def hyper_for(self, plan: onepass.Plan, optimizer: Optimizer) -> Sequence[Mapping[str, Any]] | None:
        """Return the options to send with a check by ``plan``, so that the step need not; None where it cannot step."""
        return None if plan is self._bare else self.hyper(optimizer)

    def hyper(self, optimizer: Optimizer) -> Sequence[Mapping[str, Any]]:
        """Return :func:`hyper_of`: the very same tuple while the groups have the same numbers. Raises as that does."""
        groups = optimizer.param_groups
        values = [*itertools.chain(*((*map(group.get, _OPTIONS), *group.get("betas", ())) for group in groups))]
        kinds = [*map(type, values)]
        if kinds == self._hyper[1] and values == self._hyper[0]:  # kinds first: a tensor is not compared
            return self._hyper[2]
        found = hyper_of(optimizer)
        if {*kinds} <= _NUMBERS:
            self._hyper = values, kinds, tuple(found)
        return found

    def new(self, grads: Grads) -> list[torch.Tensor]:
        """Return the parameters that have a gradient and, when the plan was last asked for, no state."""
        return [] if self._kept is None else [self._params[place][0] for place in self._kept.left_out(grads)]

    def begin(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Note that ``state`` is about to become that of ``param``: SGD's first momentum is the gradient itself."""
        if (momentum := state.get("momentum_buffer")) is not None:
            count = torch.zeros((), dtype=torch.float32, device=param.device)
            self._begun[id(param)] = momentum, count


_NUMBERS = {int, float, bool, tuple, type(None)}
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad")
"""What torch's classes read. A script may keep more in a group, under any name."""


def hyper_of(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return the options of the groups. A learning rate in host memory becomes a number, which costs no wait.

    Raises:
        ValueError: one is a tensor on the device that kernels do not read there.
    """
    groups = optimizer.param_groups
    found: list[Any] = [{key: group[key] for key in _OPTIONS if key in group} for group in groups]
    for options, group in zip(found, groups, strict=True):
        if torch.is_tensor(options["lr"]) and options["lr"].is_cpu:
            options["lr"] = float(options["lr"])
        if why := unread(options, group["params"][0].device if group["params"] else torch.device("cpu")):
            raise ValueError(why)
    return found
