"""The plans of one optimizer: one for its masters, one for the parameters that it steps as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.plans import available, forms
from xamp.plans.waiting import Waiting

__all__ = ["Grads", "Launch", "OneStep", "Part", "Plans", "hyper_of"]

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
        self._asked = _asked(kind, optimizer)
        self._kind = kind
        self.plan = available.plan(forms.FORMS[kind].rule(optimizer.param_groups[0]), rows) if rows else None

    def is_stale(self, optimizer: Optimizer) -> bool:
        """Return whether a tensor lies elsewhere or was replaced in the state, or a group asks for another rule."""
        states, tensors = _held(optimizer)
        same = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        same = same and len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        same = same and self._asked == _asked(self._kind, optimizer)
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


def _asked(kind: type[Optimizer], optimizer: Optimizer) -> list[tuple[onepass.Rule, tuple[str, ...]]]:
    """Return the rule and the states that each group asks for: a script may change a momentum in place."""
    form = forms.FORMS[kind]
    return [(form.rule(group), form.keys(group)) for group in optimizer.param_groups]


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
                held = {id(tensor) for tensor in _held(optimizer)[1]}
                self._begun = {key: value for key, value in self._begun.items() if id(value[0]) in held}
                self._parts[number] = Part(self._kind, optimizer, params, self._begun)
        return self._parts[0], self._parts[1]

    def clear(self) -> None:
        """Forget the plans: they hold the optimizer's state."""
        self._parts, self._begun, self._bare = {}, {}, None

    def checker(self, optimizer: Optimizer, grads: Grads) -> tuple[onepass.Plan, Grads]:
        """Return a plan that reads the masters' ``grads``, and these as it takes them. Raises as :meth:`parts`."""
        part, _ = self.parts(optimizer)
        if part.plan is not None and not part.left_out(grads):
            return part.plan, part.of(grads)
        if self._bare is None or self._bare.moved():
            self._bare = available.plan(onepass.Rule("sgd"), [onepass.Row(m, low) for m, low in self._params[0]])
        return self._bare, grads

    def hyper_for(self, plan: onepass.Plan, optimizer: Optimizer) -> list[Mapping[str, Any]] | None:
        """Return the options to send with a check by ``plan``, so that the step need not; None where it cannot step."""
        return None if plan is self._bare else hyper_of(optimizer)

    def without_state(self, optimizer: Optimizer, grads: Grads, plain: Grads) -> list[torch.Tensor]:
        """Return the parameters that have a gradient and no state: this is their first step."""
        found = zip(self._params, self.parts(optimizer), (grads, plain), strict=True)
        return [params[place][0] for params, part, given in found for place in part.left_out(given)]

    def begin(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Note that ``state`` is about to become that of ``param``: SGD's first momentum is the gradient itself."""
        if (momentum := state.get("momentum_buffer")) is not None:
            count = torch.zeros((), dtype=torch.float32, device=param.device)
            self._begun[id(param)] = momentum, count


_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad")
"""What torch's classes read. A script may keep more in a group, under any name."""


def hyper_of(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return the options of the groups. A learning rate in host memory becomes a number, which costs no wait."""
    groups = optimizer.param_groups
    found: list[Any] = [{key: group[key] for key in _OPTIONS if key in group} for group in groups]
    for options in found:
        if torch.is_tensor(options["lr"]) and options["lr"].is_cpu:
            options["lr"] = float(options["lr"])
    return found


class Launch:
    """One plan's part of a step."""

    def __init__(self, plan: onepass.Plan, *arguments: Any) -> None:
        self._plan = plan
        self._arguments = arguments
        self._is_prepared = False

    @property
    def began(self) -> bool:
        """Whether one of its kernels has been launched."""
        return self._is_prepared and self._plan.started()

    def run(self) -> None:
        """Step. After an interrupt run it again: it launches the kernels that were not launched yet."""
        if not self._is_prepared:
            self._plan.prepare(*self._arguments)
            self._is_prepared = True
        self._plan.finish()


def launch_all(launches: Sequence[Launch]) -> None:
    """Run ``launches``, each once. An interrupt is raised when all have run: a part of a step is none.

    A kernel is counted right after its launch, so none runs twice but where an interrupt comes between these two.
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


class OneStep:
    """A step in one pass, which is called as the ``step`` of the optimizer's class.

    Args:
        waiting: the gradients.
        begin: makes the state of parameters that are stepped for the first time; None: all have it.
        launches: returns the parts of the step.

    Attributes:
        is_first: some parameters are stepped for the first time.
    """

    def __init__(
        self, waiting: Waiting, begin: Callable[[], None] | None, launches: Callable[[], Sequence[Launch]]
    ) -> None:
        self.is_first = begin is not None
        self._waiting = waiting
        self._begin = begin
        self._launches = launches

    def __call__(self, _: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._begin is not None:
            self._begin()
        self._waiting.launches = launches = self._launches()
        try:
            launch_all(launches)
        except Exception:  # of a launch that did not come about; what was launched before must not be again
            self._waiting.launches = [launch for launch in launches if launch.began]
            raise
        return loss
