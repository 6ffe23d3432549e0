"""One pass in place of the device's step: the masters' gradients stay where the backward left them until the kernel.

This is the seam between a step and :mod:`xamp.plans`. :class:`OnePass` says for one optimizer whether the gradients of
a backward may wait, takes their norm, and puts the kernels in the place of torch's step. Where anything does not suit,
the gradients move into the masters, and the step is the ordinary one.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.distributed.ranks import is_dtensor
from xamp.ground.log import say
from xamp.plans import available, forms, steps
from xamp.plans.waiting import Grads, Seen, Waiting, has_gradient, mark_written, never, parameter_class
from xamp.scaling import unscale
from xamp.scaling.fused import FusedChoice

if TYPE_CHECKING:
    from xamp.scaling.gradients import Gradients

__all__ = ["OnePass", "refusal", "tell_of_the_end"]


def refusal(optimizer: Optimizer, fused: FusedChoice, gradients: Gradients, device: torch.device) -> str:
    """Return in one line why steps of ``optimizer`` cannot be taken in one pass; empty where they can.

    ``device``: that of the loss scale.
    """
    if not gradients.pairs:
        return "there are no masters"
    if not fused.skips_on_device:
        return "a group is not fused, so the host decides on its steps"
    tensors = [tensor for pair in gradients.pairs for tensor in pair] + gradients.direct
    if any(map(is_dtensor, tensors)) or gradients.in_shards:
        return "parameters are sharded"
    if any(tensor.device != device for tensor in tensors):
        return "parameters are on several devices"
    if not all(map(onepass.takes, tensors)):
        return "a parameter is complex, sparse, in fp64 or not dense in memory"
    return forms.refusal(fused.kind, optimizer) or available.refusal(device)


class OnePass:
    """What one optimizer needs to step in one pass. It lives as long as the groups hold what they held.

    Args:
        optimizer: the optimizer, held weakly.
        gradients: its gradients.
        fused: its form.
        capturing: returns whether a graph is being captured now; None: the device has no graphs.
    """

    def __init__(
        self, optimizer: Optimizer, gradients: Gradients, fused: FusedChoice, capturing: Callable[[], bool] | None
    ) -> None:
        own: Any = weakref.WeakMethod(self._drop)
        self._end = weakref.ref(optimizer, lambda _: None if own() is None else own()())
        self._gradients = gradients
        self._fused = fused
        self._capturing = capturing or never
        self._plans = steps.Plans(fused.kind, [(m, p) for p, m in gradients.pairs], gradients.direct, capturing)
        self._master_class = parameter_class(gradients.materialize, gradients.release)

    # ---------------------------------------------------------------- after a backward

    def wait(self, optimizer: Optimizer, inverse: torch.Tensor | None, found_inf: torch.Tensor | None) -> bool:
        """Let the gradients of a first backward wait, and check them; return whether they do.

        Those of parameters without a master are checked and unscaled with them, in place, where there is a check.

        Args:
            optimizer: the optimizer.
            inverse: 1/scale; None: there is no scale.
            found_inf: raised where one is inf or nan; None: they are not checked.
        """
        gradients = self._gradients
        grads, direct = [param.grad for param, _ in gradients.pairs], gradients.of_direct()
        if not self._may_wait(grads, direct):
            return False
        if self._capturing() and not self._plans.begin_in_graph(optimizer, [*grads, *direct]):
            return False
        try:
            plan, own = self._plans.checker(optimizer, [*grads, *direct])
        except ValueError as error:
            self._give_up(optimizer, str(error))
            return False
        if not plan.suits(own):
            return False
        inverse = None if inverse is None else inverse.clone()  # the scale moves before the step
        if found_inf is not None:
            plan.check(own, found_inf, self._plans.hyper_for(plan, optimizer), inverse)
            mark_written(direct)
        seen = Seen(plan, direct, found_inf is not None)
        gradients.waiting = waiting = Waiting(gradients.pairs, grads, inverse, seen, self._capturing)
        waiting.hold(self._master_class)
        return True

    def _may_wait(self, grads: Grads, direct: Grads) -> bool:
        held = [grad for grad in grads if grad is not None]
        if not held or any(has_gradient(master) for _, master in self._gradients.pairs):
            return False
        if self._gradients.hidden is not None and any(grad._is_view() for grad in held):
            return False  # DDP writes its buckets anew in the next forward
        return not any(grad.requires_grad for grad in (*held, *direct) if grad is not None)

    def _drop(self) -> None:
        """Let the state of an optimizer that is gone go: plans hold it."""
        self._plans.clear()
        if self._gradients.waiting is not None:
            self._gradients.waiting.launch = self._gradients.waiting.seen.plan = None

    def _give_up(self, optimizer: Optimizer, why: str) -> None:
        self._gradients.one_pass = None
        tell_of_the_end(optimizer, why)

    # ---------------------------------------------------------------- clipping

    def _reader(self, optimizer: Optimizer, waiting: Waiting) -> tuple[onepass.Plan, Grads] | None:
        """Return a plan that reads all gradients as they are now; None where it does not take something."""
        direct = self._gradients.of_direct()
        try:
            plan, own = self._plans.checker(optimizer, [*waiting.grads, *direct])
        except ValueError as error:
            self._give_up(optimizer, str(error))
            return None
        return (plan, own) if waiting.seen.suits(plan, direct) or plan.suits(own) else None

    def norm(self, optimizer: Optimizer, waiting: Waiting, kind: float) -> torch.Tensor | None:
        """Return the norm of all unscaled and clipped gradients, fp32, no dimensions; None: no kernel can."""
        checked = kind == 2.0 and waiting.whole
        norm = waiting.seen.norm(self._gradients.of_direct(), waiting.inverse) if checked else None
        if norm is not None:
            return norm if waiting.clip is None else norm * waiting.clip
        reader = self._reader(optimizer, waiting)
        return None if reader is None else reader[0].norm(reader[1], waiting.inverse, kind, waiting.clip)

    def clip(self, optimizer: Optimizer, waiting: Waiting, norm: torch.Tensor, max_norm: Any) -> None:
        """Clip gradients of ``norm`` by torch's rule: those that wait when the pass reads them, the others now."""
        direct = self._gradients.of_direct()
        reader = None if torch.is_tensor(max_norm) else self._reader(optimizer, waiting)
        if reader is None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(torch.float32)
            unscale.multiply_([grad for grad in direct if grad is not None], factor)
        else:
            factor = reader[0].clip_factor(reader[1], norm, max_norm)
            mark_written(direct)
        waiting.clip = factor if waiting.clip is None else waiting.clip * factor

    # ---------------------------------------------------------------- the step

    def step(self, optimizer: Optimizer, found_inf: torch.Tensor | None, hooked: bool) -> steps.OneStep | None:
        """Return the step of the gradients that wait; None where the kernels do not suit it.

        ``found_inf``: the kernels skip by it; None: nothing was checked. ``hooked``: other code runs before the step.
        """
        gradients, waiting = self._gradients, self._gradients.waiting
        if waiting is None or not self._fused.skips_on_device:
            return None
        if any(getattr(optimizer, name, None) is not None for name in ("_xamp_own_step", "grad_scale")):
            return None  # somebody steps, or scales, in a way of their own
        if any(has_gradient(master) for _, master in gradients.pairs):
            return None
        if gradients.not_held(optimizer.param_groups) is not None:
            return None  # a script has put other parameters into the groups since
        reader = self._reader(optimizer, waiting)
        new = self._plans.new([*waiting.grads, *gradients.of_direct()])
        if reader is None or any(optimizer.state.get(param) for param in new):
            return None
        begin = functools.partial(self._make_state, optimizer, new) if new else None
        known = None if new or hooked else reader
        return steps.OneStep(waiting, begin, functools.partial(self._launch, optimizer, waiting, found_inf, known))

    def _make_state(self, optimizer: Optimizer, new: Sequence[torch.Tensor]) -> None:
        """Make the state of parameters that are stepped for the first time, as the form that the user gave makes it."""
        forms.make_states(self._fused.kind, optimizer, new, self._fused.counter_device, self._plans.begin)
        self._fused.move_counters(optimizer)

    def _launch(self, optimizer: Optimizer, waiting: Waiting, found_inf: Any, known: Any) -> steps.Launch:
        plan, own = known or self._plans.stepper(optimizer, [*waiting.grads, *self._gradients.of_direct()])
        return steps.Launch(plan, own, steps.hyper_of(optimizer), found_inf, waiting.inverse, waiting.clip)


def tell_of_the_end(optimizer: Optimizer, why: str) -> None:
    """Warn that an optimizer that was to step in one pass cannot do so any more."""
    name = getattr(optimizer, "_xamp_base", type(optimizer)).__name__
    message = "%s does not step in one pass any more, as fused='one-pass' asks, but as torch steps it: %s."
    say(message, name, why, level=logging.WARNING)
