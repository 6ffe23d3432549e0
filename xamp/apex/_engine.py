"""xamp's engine with Apex's rules, where these differ from xamp's own.

All optimizers of a backward that overflowed skip their step together. A static scale is never checked. The model keeps
its fp16 gradients, still scaled, while the masters have theirs. Whatever Apex accepts is accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.apex._properties import tell
from xamp.distributed import ranks
from xamp.policy import Policy
from xamp.scaling import moves, unscale
from xamp.scaling.block import Block
from xamp.scaling.counts import StepOutcome
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedChoice
from xamp.scaling.gradients import Gradients
from xamp.scaling.masters import Pair
from xamp.scaling.moves import GradientSentinel
from xamp.scaling.outcomes import Outcomes
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState, StepWay
from xamp.scaling.weights import MasterVersions, Weights
from xamp.values.containers import cast_any
from xamp.values.log import say

__all__ = ["ApexEngine", "ApexPolicy", "OnModel"]

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


class OnModel(NamedTuple):
    """Scaled gradients that stay on the model for FusedSGD. What is done to them there counts, as in Apex.

    Attributes:
        pairs: the low-precision parameters that have them, and their masters.
        inverse: 1/scale, a copy; None: they have no scale.
    """

    pairs: Sequence[Pair]
    inverse: torch.Tensor | None

    def present(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each master that has a gradient there now, and that gradient, scaled as it is."""
        return [(master, param.grad) for param, master in self.pairs if param.grad is not None]

    def by_master(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are there now, by the ids of their masters."""
        return {id(master): grad for master, grad in self.present()}


class ApexGradients(Gradients):
    """Leaves the gradients of low-precision parameters where they are until the next backward, and then drops them.

    Attributes:
        on_model: those that no master has yet; None: the masters have theirs.
    """

    on_model: OnModel | None = None

    def _make_sentinel(self) -> GradientSentinel | None:
        return None  # the parameters keep gradients

    def present(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`Gradients.present`. Those that no master has yet are among them."""
        found = super().present()
        return found if self.on_model is None else [*found, *self.on_model.present()]

    def _is_any_present(self) -> bool:
        return super()._is_any_present() or (self.on_model is not None and bool(self.on_model.present()))

    def enter(self, scaler: LossScaler) -> None:
        """See :meth:`Gradients.enter`. Drops old low-precision gradients: the masters have all that count."""
        self.move_held()
        if self.pending is None:
            self._drop_low_precision()
        super().enter(scaler)

    def _may_multiply(self, *_: object) -> bool:
        return False  # Apex puts gradients of earlier losses aside during a backward, and does not check them again

    def _check_left_over(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Do nothing: see :meth:`_may_multiply`."""

    def move_held(self) -> None:
        """See :meth:`Gradients.move_held`."""
        stayed, self.on_model = self.on_model, None
        if stayed is not None:
            inverse = stayed.inverse
            moves.transfer(
                self.params,
                None if inverse is None else lambda grads: unscale.multiply_(grads, inverse),
                leave=True,
            )

    def _move_to_masters(self, scaler: LossScaler, found_inf: torch.Tensor | None, *_: object) -> bool:
        """See :meth:`Gradients._move_to_masters`. Gradients that FusedSGD takes from the model are checked there."""
        grads = [param.grad for param, _ in self.params.pairs if param.grad is not None]
        if not self._stay_on_model(grads, scaler):
            return moves.transfer(self.params, self._finisher(scaler, found_inf), leave=True)
        if found_inf is not None:
            unscale.check(grads, found_inf, self._backend.unscale_)
        self.on_model = OnModel(self.params.pairs, scaler.inverse.clone() if self._policy.scales else None)
        return True

    def _stay_on_model(self, grads: Sequence[torch.Tensor], scaler: LossScaler) -> bool:
        if getattr(self._optimizer(), "materialize_master_grads", True) or not grads:
            return False
        if self._unreduced.by_wrapper() and any(grad._is_view() for grad in grads):
            return False  # DDP writes its buckets anew in the next forward
        known = all(grad.layout is torch.strided and grad.device == scaler.scale.device for grad in grads)
        known = known and not any(grad.requires_grad or ranks.is_dtensor(grad) for grad in grads)
        return known and all(master.grad is None for _, master in self.params.pairs)

    def drop(self) -> None:
        """See :meth:`Gradients.drop`."""
        self.on_model = None
        super().drop()

    def cleared(self) -> None:
        """See :meth:`Gradients.cleared`."""
        self.on_model = None
        super().cleared()

    def clear_masters(self) -> None:
        """Clear the masters' gradients after a step. The model keeps those that were stepped from there."""
        self.on_model = None
        for _, master in self.params.pairs:
            master.grad = None


class ApexOutcomes(Outcomes):
    """Tells of overflows in Apex's words.

    Attributes:
        found: the overflow flag of the last backwards, by ``loss_id``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[int, torch.Tensor] = {}

    def note(self, index: int, found: torch.Tensor) -> None:
        """Keep ``found``, the overflow flag of a backward with loss scale ``index``, so that a log line can name it."""
        before = self.found.get(index)
        self.found[index] = found.clone() if before is None else torch.maximum(before, found)

    def tell_of_overflow(self, scales: Sequence[float], used: Collection[int]) -> None:
        """See :meth:`Outcomes.tell_of_overflow`."""
        first = next((index for index, found in self.found.items() if bool(found)), next(iter(used)))
        tell(f"Gradient overflow.  Skipping step, loss scaler {first} reducing loss scale to {scales[first]}")


class ApexWeights(Weights):
    """The masters start from the fp16 values of their parameters: Apex makes them at their first use.

    Attributes:
        resumes: a checkpoint was loaded, which has exact masters, and the run goes on from it.
    """

    resumes = False

    def look_for_lost_writes(self, *, in_turn: bool = True) -> None:
        """Do nothing: Apex says nothing."""

    def _follow_afresh(self, versions: MasterVersions, **_: bool) -> None:
        versions.copy_masters_to_model()  # what was written into the model through .data stays, as in Apex

    def start(self) -> None:
        """See :meth:`Weights.start`."""
        super().start()
        self.lower(self.pairs)

    def lower(self, pairs: Sequence[Pair]) -> None:
        """Give masters the values of their parameters, unless the run goes on from a checkpoint."""
        if not self.resumes:
            ranks.copy([m for _, m in pairs], [p for p, _ in pairs])

    def resume(self) -> None:
        """Go on from a checkpoint, which has exact masters."""
        self.resumes = True


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

    weights: ApexWeights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales_loaded = False
        self._scalers_used: dict[int, None] = {}
        self.around_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.after_backward: Callable[[], object] = lambda: None
        self.unskipped = [0] * self.policy.num_losses
        self.found: torch.Tensor | None = None
        self.number = next(_numbers)
        self._warned_of_scaled: Any = WeakIdKeyDictionary()  # by optimizer

    @staticmethod
    def caster() -> Callable[[Any, torch.dtype], Any]:
        """See :meth:`Engine.caster`."""
        return cast_any

    def _make_weights(self) -> ApexWeights:
        return ApexWeights(*self._arguments_of_weights())

    def _make_gradients(self, *arguments: Any) -> ApexGradients:
        return ApexGradients(self.policy, self.backend, *arguments)

    def _make_outcomes(self, index: int, gradients: ApexGradients) -> ApexOutcomes:
        return ApexOutcomes(self.counts, self.numbers.memory, index, gradients, self.numbers.unseen)

    def make_state(self, optimizer: Optimizer, index: int, fused: FusedChoice) -> OptimizerState:
        """See :meth:`Engine.make_state`."""
        state = super().make_state(optimizer, index, fused)
        self._take_saved(optimizer)
        return state

    def refuse_shared(self, state: OptimizerState, params: Iterable[torch.Tensor]) -> None:
        """Do nothing: Apex accepts shared parameters."""

    def adopt_group(self, state: OptimizerState, group: Mapping[str, Any]) -> None:
        """See :meth:`Engine.adopt_group`. The masters of a group added later start as in :meth:`ApexWeights.start`."""
        known = len(self.weights.pairs)
        super().adopt_group(state, group)
        self.weights.lower(self.weights.pairs[known:])

    def saved_groups(self, state: OptimizerState, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See :meth:`Engine.saved_groups`. Adds the loss scales, for scripts that save no state of amp."""
        del state
        if groups:
            groups = [{**groups[0], _SAVED: self.scales_in_use()}, *groups[1:]]
        return groups

    def loaded(self, state: OptimizerState) -> None:
        """See :meth:`Engine.loaded`."""
        self.weights.resume()
        self._take_saved(state.optimizer)
        super().loaded(state)

    def _take_saved(self, optimizer: Optimizer) -> None:
        """Remove saved loss scales from the groups, where a loaded state has them, and resume from them."""
        for group in optimizer.param_groups:
            found = group.pop(_SAVED, None)
            if found is not None:
                self._resume_scales(found)

    def scales_in_use(self) -> list[list[float]]:
        """``[index, scale, clean updates]`` of each dynamic scale that was used. Waits for the device."""
        scalers = [self.scalers[index] for index in self._scalers_used]
        return [[s.index, float(s.scale), int(s.growth_tracker)] for s in scalers if s.rules.dynamic]

    def _resume_scales(self, saved: Sequence[Sequence[float]]) -> None:
        """Go on with the loss scales from a saved state of an optimizer.

        A loss without a scale of its own in the saved run starts with the smallest of the saved scales.
        """
        self.weights.resume()
        if self.scales_loaded or not self.policy.dynamic or not saved:
            return
        known = {int(index): (scale, int(clean)) for index, scale, clean in saved}
        smallest = min(scale for scale, _ in known.values())
        for index, scaler in enumerate(self.scalers):
            scaler.set(*known.get(index, (smallest, 0)))

    def has_work(self, scaler: LossScaler) -> bool:
        """Whether a loss with this scale needs any work."""
        return self.policy.master_weights or scaler.rules.dynamic or scaler.host_scale != 1.0

    def _refuse_overlap(self, block: Block) -> None:
        """See :meth:`Engine.enter`. Blocks of different optimizers may be open at once with one scale."""
        self.blocks.refuse(
            "scale_loss(loss, optimizers): another scale_loss over one of these optimizers is open.", block.states
        )

    def end_backward(self) -> None:
        """See :meth:`Engine.end_backward`."""
        super().end_backward()
        self.after_backward()

    def overflow_of(self, flags: torch.Tensor) -> torch.Tensor:
        """See :meth:`Engine.overflow_of`: if one optimizer of a backward overflowed, all skip their steps."""
        found = flags.max()
        flags.fill_(found)
        return found

    def record_check(self, block: Block, found_inf: torch.Tensor) -> None:
        """See :meth:`Engine.record_check`. With Apex each scale_loss is an update, and one with delay_unscale none."""
        self.found = found_inf
        if not block.delay_overflow_check:
            for state in block.states if len(self.scalers) > 1 else ():
                state.outcomes.note(block.scaler.index, found_inf)  # type: ignore[attr-defined]
            block.scaler.update(found_inf)

    def leave(self, block: Block, kind: type[BaseException] | None) -> None:
        """See :meth:`Engine.leave`; also counts the uses of a static scale, for the state that Apex saves."""
        super().leave(block, kind)
        if kind is None:
            self._scalers_used[block.scaler.index] = None
            if not (block.delay_unscale or block.delay_overflow_check or block.scaler.rules.dynamic):
                self.unskipped[block.scaler.index] += 1

    def forget_check(self) -> None:
        """Forget the flag of the last backward, so that :attr:`found` is that of the next."""
        self.found = None

    def learn_of_overflow(self, states: Sequence[OptimizerState]) -> None:
        """Let ``states`` skip their next steps, for another engine has found an overflow in the same backward."""
        for state in states if self.policy.checks else ():
            state.overflowed_since_step.fill_(1.0)
            state.note_check()

    def zero_grad(
        self, state: OptimizerState, own: Callable[[], object] | None = None, values: Sequence[Any] = ()
    ) -> None:
        """See :meth:`Engine.zero_grad`. With masters, parameters that stayed fp32 keep gradients of zeros.

        So momentum, weight decay and Adam's moments go on for a parameter that a backward leaves out.
        """
        keeps = self.policy.master_weights and not values
        kept = [(p, p.grad) for p in state.gradients.params.without_master if p.grad is not None] if keeps else []
        super().zero_grad(state, own, values)
        for param, grad in kept:
            param.grad = grad.detach_().zero_()

    def begin_reading(self, state: OptimizerState, call: str) -> None:
        """See :meth:`Engine.begin_reading`. Gradients are read as they are, also inside of ``scale_loss``."""
        del state
        self.mark.begin(call)

    def step(
        self, state: OptimizerState, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``optimizer.step(*args, **kwargs)``, skipped if a backward since the last step overflowed.

        Raises:
            RuntimeError: a closure is given, and there are masters or the step is skipped.
            StateError: the backend says that the step would be wrong.
        """
        self.refuse_wrong(state)
        self._warn_of_scaled(state)
        checked = state.checked_since_step and self.policy.checks
        decided, values = self._decide(state, StepWay.HOST if checked else StepWay.UNCHECKED)
        skips = decided is StepOutcome.SKIPPED
        given = any(value is not None for value in (*args, *kwargs.values()))
        if given and (skips or self.policy.master_weights):
            raise RuntimeError(_CLOSURE)
        self.mark.begin("optimizer.step()")
        result = None if skips else self.mark.run_foreign(self._run, state, base, args, kwargs)
        records = state.end_step(StepWay.HOST if checked else StepWay.UNCHECKED, decided, values, None)
        self.mark.end()
        try:
            self._observe(state, records)  # may name the masters whose gradients are not finite
        finally:
            self.mark.begin("optimizer.step()")
            state.outcomes.found.clear()  # type: ignore[attr-defined]
            state.gradients.clear_masters()  # type: ignore[attr-defined]
            self.mark.end()
        return result

    def _run(self, state: OptimizerState, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Step; gradients that stayed on the model are given to the optimizer, FusedSGD, for this step."""
        optimizer, stayed = state.optimizer, state.gradients.on_model  # type: ignore[attr-defined]
        with self.around_step():
            if stayed is None:
                return base(*args, **kwargs)
            vars(optimizer)["lent"] = stayed
            try:
                return base(*args, **kwargs)
            finally:
                del vars(optimizer)["lent"]

    def _warn_of_scaled(self, state: OptimizerState) -> None:
        """Warn once of a step inside of ``scale_loss``. Apex accepts it silently; with Adam at O1 that even trains."""
        self.blocks.drop_abandoned()
        if self.blocks.overlapping([state]) and state.optimizer not in self._warned_of_scaled:
            self._warned_of_scaled[state.optimizer] = True
            say(
                "%s.step() inside of `with amp.scale_loss(...)`: gradients are not unscaled there yet, nor handed to "
                "masters where there are any. Call it after the block.",
                type(state.optimizer).__name__,
                level=logging.WARNING,
            )
