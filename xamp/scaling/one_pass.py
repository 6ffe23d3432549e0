"""The step in one pass, which ``fused="one-pass"`` asks for: the one module by which the step reaches the kernels.

:class:`OnePass` takes the gradients of a backward off the model and checks them in one read, takes their norm, clips
them by a factor, and puts the kernels in the place of torch's step. Where a backward or a step does not suit, the
gradients move into the masters, and the step is the ordinary one. Who cannot step so at all is refused with the reason.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.distributed.ranks import is_dtensor
from xamp.errors import UnsupportedPolicy
from xamp.plans import available, graphs, layouts, steps
from xamp.scaling import unscale
from xamp.scaling.capture import Capture
from xamp.scaling.fused import FusedChoice
from xamp.scaling.held import Held
from xamp.scaling.parameters import Parameters
from xamp.scaling.torch_step import torch_step
from xamp.values.log import Once, say

__all__ = ["OnePass", "OnePassStep", "Seen", "error_for", "refusal"]

Grads = Sequence["torch.Tensor | None"]

_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")


def refusal(
    optimizer: Optimizer, fused: FusedChoice, params: Parameters, device: torch.device, gradients_tell: bool
) -> str:
    """Return in one line why ``optimizer`` cannot step in one pass; empty where it can.

    Args:
        optimizer: the optimizer.
        fused: its implementation.
        params: what it steps.
        device: that of the loss scale.
        gradients_tell: an overflow shows in the gradients.
    """
    if not params.pairs:
        return "there are no masters"
    if not fused.skips_on_device:
        return "a group is not fused, so the host decides on its steps"
    if not gradients_tell:
        return "the chip tells of an overflow by a flag"
    tensors = [*(tensor for pair in params.pairs for tensor in pair), *params.without_master]
    if any(map(is_dtensor, tensors)) or params.in_shards:
        return "parameters are sharded"
    if any(tensor.device != device for tensor in tensors):
        return "parameters are on several devices"
    if not all(map(onepass.takes, tensors)):
        return "a parameter is complex, sparse, in fp64 or not dense in memory"
    return layouts.refusal(fused.kind, optimizer) or available.refusal(device)


def error_for(kind: type[Optimizer], why: str) -> UnsupportedPolicy:
    """Return the error for optimizers of class ``kind``, which cannot step in one pass for the reason ``why``."""
    return UnsupportedPolicy(
        f"initialize(fused='one-pass'): {kind.__name__} cannot step in one pass: {why}. Leave fused='auto', which "
        "takes torch's fused implementation where that is right."
    )


class Seen(NamedTuple):
    """The held gradients as a plan has read them.

    Attributes:
        plan: the plan, which takes all of these gradients. It has the optimizer's state, so it is held weakly.
        others: the gradients of parameters without a master. Others read and write them on the model.
        versions: theirs.
        checked: the plan has checked all, and keeps the sum of their squares.
    """

    plan: weakref.ref[onepass.Plan]
    others: Grads
    versions: Sequence[int | None]
    checked: bool

    def suits(self, plan: onepass.Plan, others: Grads) -> bool:
        """Return whether ``plan`` is known to take the gradients that are held and ``others``."""
        return plan is self.plan() and all(map(operator.is_, others, self.others))

    def norm(self, others: Grads, inverse: torch.Tensor | None) -> torch.Tensor | None:
        """Return the L2 norm by the check; None where ``others`` are not what was checked."""
        plan = self.plan()
        if plan is None or not self.checked or not self.suits(plan, others) or _versions(others) != self.versions:
            return None
        return plan.checked_norm(inverse)


class OnePass:
    """The plans by which one optimizer steps in one pass. They live as long as its groups hold what they held.

    Args:
        optimizer: the optimizer, held weakly.
        params: what it steps.
        fused: its implementation.
        capture: of the session.
    """

    def __init__(self, optimizer: Optimizer, params: Parameters, fused: FusedChoice, capture: Capture) -> None:
        self._params = params
        self._fused = fused
        self._capture = capture
        self._said = Once()
        new_plan = functools.partial(graphs.plan_for_graphs, capturing=capture.is_running if capture.possible else None)
        self._plans = steps.Plans(fused.kind, [(m, p) for p, m in params.pairs], params.without_master, new_plan)
        drop: Any = weakref.WeakMethod(self._plans.clear)  # plans hold the optimizer's state
        self._end = weakref.ref(optimizer, lambda _: None if (clear := drop()) is None else clear())

    def _without_master(self) -> list[torch.Tensor | None]:
        return [param.grad for param in self._params.without_master]

    def _tell(self, why: object) -> None:
        """Say, once for each reason, that steps are not taken in one pass as asked."""
        if self._said.first(str(why)):
            text = "%s does not step in one pass now, as fused='one-pass' asks, but as torch steps it: %s."
            say(text, self._fused.kind.__name__, why, level=logging.WARNING)

    # ---------------------------------------------------------------- after a backward

    def hold(self, optimizer: Optimizer, inverse: torch.Tensor | None, found_inf: torch.Tensor | None) -> Held | None:
        """Return the gradients of a first backward, checked, for a step in one pass; None where they do not suit.

        Those of parameters without a master are checked and unscaled with them, in place, where there is a check.

        Args:
            optimizer: the optimizer.
            inverse: 1/scale; None: there is no scale.
            found_inf: raised where one is inf or nan; None: they are not checked.
        """
        grads, others = [*map(_GRAD, self._params.low_precision)], self._without_master()
        everything = [*grads, *others]
        if all(grad is None for grad in grads) or _is_any_of_a_graph(everything):
            return None
        in_graph = self._capture.is_running()
        if in_graph and not self._plans.begin_in_graph(optimizer, everything):
            return None
        try:
            plan, own = self._plans.checker(optimizer, everything)
            hyper = self._plans.hyper_for(plan, optimizer)
        except ValueError as why:  # the state or an option is of a kind that the kernels do not take
            self._tell(why)
            return None
        if not plan.suits(own, of_params=True):
            self._tell("a gradient does not lie in memory in the order of its master; change strides before initialize")
            return None
        inverse = None if inverse is None else inverse.clone()  # the scale moves before the step
        if found_inf is not None:
            plan.check(own, found_inf, hyper, inverse)
            _mark_written(others)
        seen = Seen(weakref.ref(plan), others, _versions(others), found_inf is not None)
        return Held(
            self._params.pairs, grads, inverse, seen, functools.partial(self._capture.refuse_other_side, in_graph)
        )

    # ---------------------------------------------------------------- clipping

    def _reader(self, optimizer: Optimizer, held: Held, *, to_step: bool = False) -> tuple[onepass.Plan, Grads] | None:
        """Return a plan that reads all gradients as they are now; None where it does not take something."""
        others = self._without_master()
        try:
            plan, own = self._plans.checker(optimizer, [*held.grads, *others], steps=to_step)
        except ValueError as why:
            self._tell(why)
            return None
        return (plan, own) if held.seen.suits(plan, others) or plan.suits(own, of_params=True) else None

    def norm(self, optimizer: Optimizer, held: Held, kind: float) -> torch.Tensor | None:
        """Return the norm of all unscaled and clipped gradients, fp32, no dimensions; None: no kernel can."""
        norm = held.seen.norm(self._without_master(), held.inverse) if kind == 2.0 and held.is_whole else None
        if norm is not None:
            return norm if held.clip is None else norm * held.clip  # type: ignore[no-any-return]
        reader = self._reader(optimizer, held)
        return None if reader is None else reader[0].norm(reader[1], held.inverse, kind, held.clip)

    def clip(self, optimizer: Optimizer, held: Held, norm: torch.Tensor, max_norm: Any) -> None:
        """Clip gradients of ``norm`` by torch's rule: held ones when the pass reads them, the others now."""
        others = self._without_master()
        reader = None if torch.is_tensor(max_norm) else self._reader(optimizer, held)
        if reader is None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(torch.float32)
            unscale.multiply_([grad for grad in others if grad is not None], factor)
        else:
            factor = reader[0].clip_factor(reader[1], norm, max_norm)
            _mark_written(others)
        held.clip_by(factor)

    # ---------------------------------------------------------------- the step

    def step_of(self, optimizer: Optimizer, held: Held, found_inf: torch.Tensor | None) -> OnePassStep | None:
        """Return the step of held gradients; None where the kernels do not suit it.

        ``found_inf``: the kernels skip by it; None: nothing was checked.
        """
        if not self._fused.skips_on_device or self._params.has_gradient_on_master():
            return None
        if any(getattr(optimizer, name, None) is not None for name in ("_xamp_own_step", "grad_scale")):
            return None  # somebody steps, or scales, in a way of their own
        if self._params.not_held(optimizer.param_groups) is not None:
            return None  # a script has put other parameters into the groups since
        try:
            hyper = self._plans.hyper(optimizer)
        except ValueError as why:
            self._tell(why)
            return None
        reader = self._reader(optimizer, held, to_step=True)
        new = self._plans.new([*held.grads, *self._without_master()])
        if reader is None or any(optimizer.state.get(param) for param in new):
            return None
        known = reader
        begin = functools.partial(self._begin, optimizer, held, new) if new else lambda: known
        return OnePassStep(held, hyper, found_inf, begin, bool(new), self._capture.is_running())

    def _begin(self, optimizer: Optimizer, held: Held, new: Sequence[torch.Tensor]) -> tuple[onepass.Plan, Grads]:
        """Make the state of parameters that are stepped for the first time; return the plan of the step."""
        layouts.make_states(self._fused.kind, optimizer, new, self._fused.counter_device, self._plans.begin)
        self._fused.move_counters(optimizer)
        return self._plans.stepper(optimizer, [*held.grads, *self._without_master()])


class OnePassStep:
    """A step in one pass.

    Args:
        held: the gradients.
        hyper: the options of the groups.
        found_inf: the kernels skip by it; None: nothing was checked.
        reader: returns the plan, and the gradients as it takes them.
        is_first: some parameters are stepped for the first time, so that the host decides: a skip leaves no state.
        uses_up: nobody may read the gradients after it: it is being captured, and each replay makes them anew.
    """

    def __init__(
        self,
        held: Held,
        hyper: Sequence[Mapping[str, Any]],
        found_inf: torch.Tensor | None,
        reader: Callable[[], tuple[onepass.Plan, Grads]],
        is_first: bool,
        uses_up: bool,
    ) -> None:
        self.is_first = is_first
        self.uses_up = uses_up
        self._held = held
        self._hyper = hyper
        self._found_inf = found_inf
        self._reader = reader
        self._written: Sequence[torch.Tensor] = ()

    def run(self) -> None:
        """Step the masters and write the model's parameters."""
        plan, own = self._reader()
        plan.step(own, self._hyper, self._found_inf, self._held.inverse, self._held.clip)
        self._written = _written(plan, own)

    def mark_written(self) -> None:
        """Give the tensors that the kernels wrote new versions, which kernels do not."""
        torch.autograd.graph.increment_version(self._written)

    def bound_to(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return the function called as the ``step`` of ``optimizer``, with its hooks and entries for the profiler."""

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            if closure is not None:
                self._hyper = steps.hyper_of(optimizer)
            self.run()
            return loss

        return torch_step(step, optimizer)


def _written(plan: onepass.Plan, grads: Grads) -> Sequence[torch.Tensor]:
    """Return the tensors that the kernels of a step write."""
    if not any(map(operator.is_, grads, itertools.repeat(None))):
        return plan.tensors
    pairs = zip(plan.rows, grads, strict=True)
    return [tensor for row, grad in pairs if grad is not None for tensor in row.tensors]


def _mark_written(grads: Grads) -> None:
    """Tell autograd that a kernel has written into ``grads``."""
    if written := [grad for grad in grads if grad is not None and not grad.is_inference()]:
        torch.autograd.graph.increment_version(written)


def _is_any_of_a_graph(grads: Grads) -> bool:
    try:
        return any(map(_REQUIRES_GRAD, grads))
    except AttributeError:  # one is None
        return any(grad is not None and grad.requires_grad for grad in grads)


def _versions(grads: Grads) -> list[int | None]:
    return [getattr(grad, "_version", None) for grad in grads]
