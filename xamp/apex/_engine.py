"""xamp's engine with Apex's rules, where these differ from xamp's own.

All optimizers of a backward that overflowed skip their step together. A static scale is never checked. The model keeps
its fp16 gradients, still scaled, while the masters have theirs. Whatever Apex accepts is accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.apex._properties import tell
from xamp.distributed import ranks
from xamp.ground.containers import cast_any
from xamp.ground.log import say
from xamp.plans.waiting import Waiting, has_gradient, parameter_class
from xamp.policy import Policy
from xamp.scaling import moves, unscale
from xamp.scaling.counts import Counts, Outcomes, StepOutcome
from xamp.scaling.engine import Engine, ScaledLoss
from xamp.scaling.fused import FusedChoice
from xamp.scaling.gradients import Gradients
from xamp.scaling.masters import Pair
from xamp.scaling.scale import DeviceState, LossScaler, clock
from xamp.scaling.step import NOT_STEPPED, OptimizerState
from xamp.scaling.weights import Weights

__all__ = ["ApexEngine", "ApexLoss", "ApexPolicy"]

_SAVED = "xamp_loss_scales"
"""Key in the first group of a saved optimizer, for the value of :meth:`ApexEngine.scales_in_use`."""

_numbers = itertools.count()

_CLOSURE = "Currently, Amp does not support closure use with optimizers."


@dataclasses.dataclass(frozen=True)
class ApexPolicy(Policy):
    """A policy under which xamp always manages gradients, since a script may change a static scale at any time.

    Attributes:
        patches: torch's functions are replaced by wrappers that cast, also inside of the models.
    """

    patches: bool = False

    @property
    def apart(self) -> bool:
        """See :attr:`Policy.apart`."""
        return not self.patches

    @property
    def spares_buffers(self) -> bool:
        """See :attr:`Policy.spares_buffers`: Apex casts them all, and says nothing."""
        return False

    scales = True
    manages_gradients = True


class ApexGradients(Gradients):
    """Leaves the gradients of low-precision parameters where they are until the next backward, and then drops them."""

    leaves_low_precision = True
    sets_aside = True

    def enter(self, scaler: LossScaler) -> None:
        """See :meth:`Gradients.enter`. Drops old low-precision gradients: the masters have all that count."""
        self.materialize()
        if self.pending is None:
            self.drop_low_precision()
        super().enter(scaler)

    def check_ready(self, call: str) -> None:
        """Do nothing: a caller that reads gradients gets them as they are."""

    def _move_to_masters(self, scaler: LossScaler, found_inf: torch.Tensor | None, first: bool) -> bool:
        """See :meth:`Gradients._move_to_masters`. Gradients that FusedSGD takes from the model are checked there."""
        grads = [param.grad for param, _ in self.pairs]
        if not self._stay_on_model(grads, scaler):
            return super()._move_to_masters(scaler, found_inf, first)
        if found_inf is not None:
            unscale.check([grad for grad in grads if grad is not None], found_inf, self._backend.unscale_)
        self.waiting = Waiting(self.pairs, grads, scaler.inverse.clone() if self._scales else None)
        self.waiting.hold(self._master_class)
        return True

    @functools.cached_property
    def _master_class(self) -> type[torch.nn.Parameter]:
        return parameter_class(self.materialize, self.release)

    def _stay_on_model(self, grads: Sequence[torch.Tensor | None], scaler: LossScaler) -> bool:
        held = [grad for grad in grads if grad is not None]
        if getattr(self._optimizer(), "materialize_master_grads", True) or not held:
            return False
        if self.hidden is not None and any(grad._is_view() for grad in held):
            return False  # DDP writes its buckets anew in the next forward
        known = all(grad.layout is torch.strided and grad.device == scaler.scale.device for grad in held)
        known = known and not any(grad.requires_grad or ranks.is_dtensor(grad) for grad in held)
        return known and not any(has_gradient(master) for _, master in self.pairs)

    def materialize(self, call: str = "") -> None:
        """See :meth:`Gradients.materialize`. As in Apex, what became of the model's gradients meanwhile counts."""
        del call
        if self.waiting is not None:
            self.waiting.follow()
            with torch.inference_mode(False):
                self.waiting.move(moves.chunk_limit(self.pairs))
            self._end_waiting()

    def end_step(self) -> None:
        """Clear the masters' gradients. The model keeps those that were stepped from there."""
        self._end_waiting()
        for _, master in self.pairs:
            master.grad = None


class ApexOutcomes(Outcomes):
    """Tells of overflows in Apex's words.

    Attributes:
        found: the overflow flag of the last backwards, by ``loss_id``.
    """

    def __init__(self, counts: Counts, memory: DeviceState, index: int, gradients: Gradients) -> None:
        super().__init__(counts, memory, index, gradients)
        self.found: dict[int, torch.Tensor] = {}

    def tell_of_overflow(self, scales: Sequence[float], used: Collection[int]) -> None:
        """See :meth:`Outcomes.tell_of_overflow`."""
        first = next((index for index, found in self.found.items() if bool(found)), next(iter(used)))
        tell(f"Gradient overflow.  Skipping step, loss scaler {first} reducing loss scale to {scales[first]}")


class ApexState(OptimizerState):
    """The step of one optimizer: taken, or skipped if a backward since the last step overflowed."""

    gradients_class = ApexGradients
    outcomes_class = ApexOutcomes
    engine: ApexEngine
    gradients: ApexGradients
    outcomes: ApexOutcomes

    def __init__(self, engine: ApexEngine, optimizer: Optimizer, index: int, fused: FusedChoice) -> None:
        super().__init__(engine, optimizer, index, fused)
        self._warned = False
        self._take_saved()

    def saved_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See :meth:`OptimizerState.saved_groups`. Adds the loss scales, for scripts that save no state of amp."""
        if groups:
            groups = [{**groups[0], _SAVED: self.engine.scales_in_use()}, *groups[1:]]
        return groups

    def loaded(self) -> None:
        """See :meth:`OptimizerState.loaded`."""
        self.engine.weights.resumes = True
        self._take_saved()
        super().loaded()

    def zero_grad(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See :meth:`OptimizerState.zero_grad`. With masters, parameters that stayed fp32 keep gradients of zeros.

        So momentum, weight decay and Adam's moments go on for a parameter that a backward leaves out.
        """
        keeps = self.engine.policy.master_weights and not (args or kwargs)
        kept = [(p, p.grad) for p in self.gradients.direct if p.grad is not None] if keeps else []
        super().zero_grad(base, args, kwargs)
        for param, grad in kept:
            param.grad = grad.detach_().zero_()

    def _take_saved(self) -> None:
        """Remove saved loss scales from the groups, where a loaded state has them, and resume from them."""
        for group in self.optimizer.param_groups:
            found = group.pop(_SAVED, None)
            if found is not None:
                self.engine.resume_scales(found)

    def step(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``optimizer.step(*args, **kwargs)``.

        Raises:
            RuntimeError: a closure is given, and there are masters or the step is skipped.
            StateError: the backend says that the step would be wrong.
        """
        self.refuse_wrong()
        self._warn_of_scaled()
        values = None if self.fresh or not self.engine.policy.checks else self._memory.values.tolist()
        skips = values is not None and self._memory.overflowed(values, self.index)
        given = any(value is not None for value in (*args, *kwargs.values()))
        if given and (skips or self.engine.policy.master_weights):
            raise RuntimeError(_CLOSURE)
        result, first = None if skips else NOT_STEPPED, self._first_stepped()
        used, applied = self.gradients.used, self.engine.counts.applied
        try:
            if not skips:
                with self.engine.around_step(), self._lending():
                    result = base(*args, **kwargs)
            self._account(skips, values, used, applied)
            return result
        except BaseException as error:
            if self.has_stepped(first, result, error):
                self._account(skips, values, used, applied)
            raise

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        """Give gradients that stayed on the model to the optimizer, FusedSGD, for one step."""
        waiting, optimizer = self.gradients.waiting, self._optimizer()
        if waiting is None:
            yield
            return
        waiting.follow()
        vars(optimizer)["lent"] = waiting
        try:
            yield
        finally:
            del vars(optimizer)["lent"]

    def _warn_of_scaled(self) -> None:
        """Warn once of a step inside of ``scale_loss``. Apex accepts it silently; with Adam at O1 that even trains."""
        if not self._warned and self.is_open():
            self._warned = True
            say(
                "%s.step() inside of `with amp.scale_loss(...)`: gradients are not unscaled there yet, nor handed to "
                "masters where there are any. Call it after the block.",
                type(self.optimizer).__name__,
                level=logging.WARNING,
            )

    def _account(self, skips: bool, values: Sequence[float] | None, used: Collection[int], applied: int) -> None:
        """End a step. After an error this runs again, however much of it is done; ``applied``: the count before."""
        for scaler in self.engine.scalers if values is not None else ():
            scaler.know(values)  # type: ignore[arg-type]
        if self.engine.policy.checks or self.engine.counts.applied == applied:
            self._finish(StepOutcome.SKIPPED if skips else StepOutcome.APPLIED)
        try:
            if values is not None and self.outcomes.seen is not values:
                self.outcomes.observe((used, clock()), values)
        finally:
            self.gradients.end_step()
            self.outcomes.found.clear()

    def note(self, index: int, found: torch.Tensor) -> None:
        """Keep ``found``, the overflow flag of a backward with loss scale ``index``, so that a log line can name it."""
        found_before = self.outcomes.found
        before = found_before.get(index)
        found_before[index] = found.clone() if before is None else torch.maximum(before, found)


class ApexWeights(Weights):
    """The masters start from the fp16 values of their parameters: Apex makes them at their first use.

    Attributes:
        resumes: a checkpoint was loaded, which has exact masters, and the run goes on from it.
    """

    tells_lost_writes = False  # Apex says nothing
    resumes = False

    def use(self) -> None:
        """See :meth:`Weights.use`."""
        super().use()
        self.lower(self.pairs)

    def lower(self, pairs: Sequence[Pair]) -> None:
        """Give masters the values of their parameters, unless the run goes on from a checkpoint."""
        if not self.resumes:
            ranks.copy([m for _, m in pairs], [p for p, _ in pairs])


class ApexEngine(Engine):
    """xamp's engine with Apex's rules; see the module.

    Attributes:
        scales_loaded: ``amp.load_state_dict`` was called. Loss scales in the state of an optimizer are then ignored.
        around_step: makes the context manager that each step runs in; at O1 it switches casts off.
        after_backward: called when a ``scale_loss`` ends; at O1 it drops the casts of weights.
        unskipped: for each loss, how often its static scale was used.
        number: engines made later have greater ones.
        found: the overflow flag of the last backward that was checked; None where nobody asked since.
    """

    skips_together = True
    state_class = ApexState
    weights_class = ApexWeights
    weights: ApexWeights
    cast = staticmethod(cast_any)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales_loaded = False
        self._scalers_used: dict[int, None] = {}
        self.around_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.after_backward: Callable[[], object] = lambda: None
        self.unskipped = [0] * self.policy.num_losses
        self.found: torch.Tensor | None = None
        self.number = next(_numbers)

    def check_not_shared(self, state: OptimizerState, params: Iterable[torch.Tensor]) -> None:
        """Do nothing: Apex accepts shared parameters."""

    def has_work(self, scaler: LossScaler) -> bool:
        """Whether a loss with this scale needs any work."""
        return self.policy.master_weights or scaler.rules.dynamic or scaler.host_scale != 1.0

    def end_backward(self) -> None:
        """See :meth:`Engine.end_backward`."""
        super().end_backward()
        self.after_backward()

    def scales_in_use(self) -> list[list[float]]:
        """``[index, scale, clean updates]`` of each dynamic scale that was used. Waits for the device."""
        scalers = [self.scalers[index] for index in self._scalers_used]
        return [[s.index, float(s.scale), int(s.growth_tracker)] for s in scalers if s.rules.dynamic]

    def _check(
        self, states: Sequence[OptimizerState], scaler: LossScaler, throw_away: bool, shared: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        self.found = found = super()._check(states, scaler, throw_away, shared)
        if len(self.scalers) > 1 and not throw_away:
            for state in states:
                state.note(scaler.index, found)  # type: ignore[attr-defined]
        if not throw_away:  # with Apex each scale_loss is an update, and one with delay_unscale is none
            scaler.update(found)
        return found

    def adopt_group(self, state: OptimizerState, group: dict[str, Any]) -> None:
        """See :meth:`Engine.adopt_group`. The masters of a group added later start as in :meth:`ApexWeights.use`."""
        known = len(self.weights.pairs)
        super().adopt_group(state, group)
        self.weights.lower(self.weights.pairs[known:])

    def _note(self, states: Sequence[OptimizerState], scaler: LossScaler, found_inf: torch.Tensor) -> None:
        """Do nothing: the scale has moved."""

    def resume_scales(self, saved: Sequence[Sequence[float]]) -> None:
        """Go on with the loss scales from a saved state of an optimizer.

        A loss without a scale of its own in the saved run starts with the smallest of the saved scales.
        """
        self.weights.resumes = True
        if self.scales_loaded or not self.policy.dynamic or not saved:
            return
        known = {int(index): (scale, int(clean)) for index, scale, clean in saved}
        smallest = min(scale for scale, _ in known.values())
        for index, scaler in enumerate(self.scalers):
            scale, clean = known.get(index, (smallest, 0))
            scaler.growth_tracker.fill_(clean)
            scaler.fill(scale)

    def leave(
        self, states: Sequence[OptimizerState], scaler: LossScaler, delay_unscale: bool, delay_overflow_check: bool
    ) -> None:
        """See :meth:`Engine.leave`; also counts the uses of a static scale, for the state that Apex saves."""
        super().leave(states, scaler, delay_unscale, delay_overflow_check)
        self._scalers_used[scaler.index] = None
        if not (delay_unscale or delay_overflow_check or scaler.rules.dynamic):
            self.unskipped[scaler.index] += 1


class ApexLoss(ScaledLoss):
    """The context manager of ``amp.scale_loss``. Blocks of different optimizers may be open at once, with one scale."""

    __slots__ = ()

    def _is_busy(self) -> bool:
        return any(state.is_open() for state in self._states)
