"""The plans of one optimizer: one for its masters, one for the parameters that it steps as they are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.plans import forms

__all__ = ["Grads", "Launch", "Part", "Plans", "hyper_of", "launch_all"]

Param = tuple[torch.Tensor, "torch.Tensor | None"]
Grads = Sequence["torch.Tensor | None"]
Begun = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a parameter: the momentum that was made for it, and its count of steps."""


class Part:
    """A plan over some parameters of an optimizer, with what tells that it is out of date.

    Attributes:
        plan: None where no parameter has its state yet, or there is none.

    Raises:
        ValueError: the kernels do not take one of the tensors.
    """

    def __init__(self, kind: type[Optimizer], optimizer: Optimizer, params: Sequence[Param], begun: Begun) -> None:
        rows, self._places = forms.rows_of(kind, optimizer, params, begun)
        self._left_out = sorted(set(range(len(params))) - set(self._places))
        self._states, self._tensors = _held(optimizer)
        self.plan = onepass.Plan(forms.FORMS[kind].rule(optimizer.param_groups[0]), rows) if rows else None

    def is_stale(self, optimizer: Optimizer) -> bool:
        """Return whether a tensor lies elsewhere, or another has taken its place in the optimizer's state."""
        states, tensors = _held(optimizer)
        same = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        same = same and len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return not same or (self.plan is not None and self.plan.moved())

    def left_out(self, grads: Grads) -> list[int]:
        """Return the places of parameters that have a gradient and no row, for they have no state."""
        return [place for place in self._left_out if grads[place] is not None]

    def of(self, grads: Grads) -> Grads:
        """Return those of ``grads`` for which there are rows."""
        return [grads[place] for place in self._places] if self._left_out else grads

    def suits(self, grads: Grads) -> bool:
        """Return whether the kernels take ``grads``, one or None for each parameter."""
        return self.plan is None or self.plan.suits(self.of(grads))


def _held(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    states = [*optimizer.state.values()]
    return states, [value for state in states for value in state.values()]


class Plans:
    """The plans of one optimizer, each made again where something has moved.

    Args:
        kind: the class of the optimizer before it was managed.
        masters: masters, each with its low-precision parameter.
        plain: what is stepped besides.
    """

    def __init__(self, kind: type[Optimizer], masters: Sequence[Param], plain: Sequence[torch.Tensor]) -> None:
        self._kind = kind
        self._params: tuple[Sequence[Param], Sequence[Param]] = (masters, [(param, None) for param in plain])
        self._parts: dict[int, Part] = {}
        self._begun: Begun = {}
        self._bare: onepass.Plan | None = None  # of masters that have no state yet: it checks

    def parts(self, optimizer: Optimizer) -> tuple[Part, Part]:
        """Return the part of the masters and that of the others.

        Raises:
            ValueError: see :class:`Part`.
        """
        for number, params in enumerate(self._params):
            part = self._parts.get(number)
            if part is None or part.is_stale(optimizer):
                self._parts[number] = Part(self._kind, optimizer, params, self._begun)
        return self._parts[0], self._parts[1]

    def checker(self, optimizer: Optimizer, grads: Grads) -> tuple[onepass.Plan, Grads]:
        """Return a plan that reads the masters' ``grads``, and these as it takes them. Raises as :meth:`parts`."""
        part, _ = self.parts(optimizer)
        if part.plan is not None and not part.left_out(grads):
            return part.plan, part.of(grads)
        if self._bare is None or self._bare.moved():
            self._bare = onepass.Plan(onepass.Rule("sgd"), [onepass.Row(m, low) for m, low in self._params[0]])
        return self._bare, grads

    def hyper_for(self, plan: onepass.Plan, optimizer: Optimizer) -> list[Mapping[str, Any]] | None:
        """Return the options to send with a check by ``plan``, so that the step need not; None where it cannot step."""
        return None if plan is self._bare else hyper_of(optimizer)

    def without_state(self, optimizer: Optimizer, grads: Grads, plain: Grads) -> list[torch.Tensor]:
        """Return the parameters that have a gradient and no state: this is their first step."""
        found = zip(self._params, self.parts(optimizer), (grads, plain), strict=True)
        return [params[place][0] for params, part, given in found for place in part.left_out(given)]

    def begin(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Note that ``state`` is about to become that of ``param``: the momentum of SGD is the first gradient itself."""
        if (momentum := state.get("momentum_buffer")) is not None:
            count = torch.zeros((), dtype=torch.float32, device=param.device)
            self._begun[id(param)] = momentum, count


def hyper_of(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return the options of the groups; a rate in host memory is a number, for which nobody waits."""
    return [
        {**group, "lr": float(group["lr"])} if torch.is_tensor(group["lr"]) and group["lr"].is_cpu else group
        for group in optimizer.param_groups
    ]


class Launch:
    """One plan's part of a step."""

    def __init__(self, plan: onepass.Plan, *arguments: Any) -> None:
        self._plan = plan
        self._arguments = arguments
        self._before: int | None = None  # launches of the plan when this began

    @property
    def began(self) -> bool:
        """Whether it has been run, or was about to step when an interrupt came."""
        return self._before is not None

    def run(self) -> None:
        """Step. After an interrupt run it again: it steps where nothing was launched, and counts as done else."""
        if self._before is None or self._plan.launches in (0, self._before):
            self._before = self._plan.launches
            self._plan.step(*self._arguments)


def launch_all(launches: Sequence[Launch]) -> None:
    """Run ``launches``, each once. An interrupt is raised when all have run: a part of a step is none.

    Nobody can tell of a kernel that was being launched when an interrupt came whether it is on its way. It counts as
    launched, so that no step is taken twice.
    """
    done = 0
    try:
        for launch in launches:
            launch.run()
            done += 1
    except Exception:
        raise
    except BaseException:
        for launch in launches[done:]:
            launch.run()
        raise
