"""One optimizer's part in a training step: gradients in and out of the scale, the decision to skip, the masters.

The life of a gradient, with every value on the device::

    enter   gradients left by earlier losses are multiplied by the scale, so that the backward adds like to like
    (the body runs backward)
    leave   lowered parameters: the gradient moves into the master; all: multiplied by 1/scale and checked
    step    skipped if a backward since the last step overflowed; then masters are written back

Between ``leave`` and ``step`` gradients are plain numbers: clipping, logging and surgery see what fp32 would give.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from xamp import _gradients, _masters
from xamp._fused import FusedForm, skips_on_device
from xamp._log import say
from xamp._scale import COLLAPSE_RUN, CollapseWatch, History, LossScaler
from xamp.errors import LossScaleCollapsed, StateError

if TYPE_CHECKING:
    from xamp._engine import Engine

__all__ = ["OptimizerState", "StepOutcome"]


class StepOutcome(enum.Enum):
    """What ``optimizer.step()`` did."""

    APPLIED = "applied"
    SKIPPED = "skipped"


class _Pending:
    """Gradients that are still scaled: ``delay_unscale``, or a wrapper that has yet to reduce them."""

    def __init__(self, scaler: LossScaler, why: str) -> None:
        self.scaler = scaler
        self.version = scaler.version
        self.inverse = scaler.inverse.clone()
        self.why = why


class _Entry:
    """How the gradients stood on entering ``scale_loss``, to tell what an exception in its body has touched."""

    def __init__(
        self, grads: list[torch.Tensor] | None = None, stash: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> None:
        self.grads = grads or []
        self.stash = stash  # (parameter, its gradient before)
        self.versions = [g._version for g in self.grads]

    def untouched(self, now: list[torch.Tensor]) -> bool:
        """Whether ``now`` are the gradients of entry, not written to since."""
        return len(now) == len(self.grads) and all(
            a is b and a._version == v for a, b, v in zip(now, self.grads, self.versions, strict=True)
        )

    def to_put_back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(gradient now, what was put aside of it), but for those that were cleared in the meantime."""
        return [(p.grad, old) for p, old in self.stash or () if p.grad is not None]


_NOTHING = _Entry()


class OptimizerState:
    """What xamp keeps for one optimizer. It sits in the optimizer as ``_xamp`` and holds it weakly.

    Attributes:
        engine: what it belongs to.
        index: its place among the engine's optimizers.
        fused: the choice of the fused form.
        plain: parameters stepped as they are.
        pairs: lowered parameters and the masters stepped in their place.
        outcome: what the last step did: an outcome, or the flag on the device that tells; None before the first.
        open: a ``scale_loss`` over this optimizer is being executed.
        fresh: no backward went through ``scale_loss`` since the last step, so the sticky flag is down.
        flag: fp32 scalar, what the backward just left found where it cannot go into ``sticky`` at once.
        sticky: fp32 scalar, whether any backward since the last step overflowed.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, index: int, fused: FusedForm) -> None:
        self.engine = engine
        self.index = index
        self.fused = fused
        self.plain: list[torch.Tensor] = []
        self.pairs: list[_masters.Pair] = []
        self.outcome: StepOutcome | torch.Tensor | None = None
        self.open = False
        self.fresh = True
        self.flag = engine.memory.flags[index]
        self.sticky = engine.memory.sticky[index]
        self._optimizer = weakref.ref(optimizer)
        self._watch = CollapseWatch(engine.policy, engine.scalers)
        self._history = History(engine.memory)
        self._ready = False  # some backward went through scale_loss since the last step
        self._mixed = False  # gradients that were checked before are in what is checked next
        self._pending: _Pending | None = None
        self._entry = _Entry()
        self._witness: _masters.GradientWitness | None = None
        self._used: set[int] = set()  # indices of the scalers since the last step
        self._warm: set[int] = set()  # ids of parameters that have taken a step, so that their state exists
        self._warm_states = 0
        self.find_parameters()

    # ---------------------------------------------------------------- parameters

    def find_parameters(self) -> None:
        """Read the optimizer's groups again; called when they changed."""
        param_of = {id(m): p for p, m in self.engine.pairs()}
        self.plain, self.pairs = [], []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                lowered = param_of.get(id(param))
                if lowered is None:
                    self.plain.append(param)
                else:
                    self.pairs.append((lowered, param))
        witness = self._witness
        self._witness = _masters.GradientWitness(self.pairs) if self.pairs else None
        if witness is not None and witness.collect() and self._witness is not None:
            self._witness.leave()
        self._uniform = len({(p.device, p.dtype) for p in self._stepped()}) <= 1
        self._in_fp32 = all(p.dtype == torch.float32 for p in self.plain)
        self._size = len(self.plain) + len(self.pairs)
        self._warm = set()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        found = self._optimizer()
        assert found is not None, "the optimizer owns this object"
        return found

    def model_params(self) -> list[torch.Tensor]:
        """The parameters as the models and their wrappers know them."""
        return [*self.plain, *(p for p, _ in self.pairs)]

    def _stepped(self) -> list[torch.Tensor]:
        return [*self.plain, *(m for _, m in self.pairs)]

    # ---------------------------------------------------------------- scale_loss

    def enter(self, scaler: LossScaler) -> None:
        """Bring gradients that are already there to the scale of the backward to come."""
        self.open = True
        if self._witness is not None:
            self._witness.collect()
        if self._pending is not None:
            self._enter_pending(self._pending, scaler)
            return
        if self.pairs:  # a plain backward() left something in the lowered parameters: it counts as it is
            _masters.transfer(self.pairs, None)
        existing = [g for p in self.plain if (g := p.grad) is not None]
        if not existing:
            self._entry = _NOTHING
        elif not self.engine.policy.scales:
            self._entry = _Entry(existing)
        elif scaler.exact and self._in_fp32:
            _gradients.multiply_(existing, scaler.scale)
            self._mixed = True
            self._entry = _Entry(existing)
        else:
            stash = [(p, p.grad.detach().clone()) for p in self.plain if p.grad is not None]
            _gradients.zero_(existing)
            self._entry = _Entry(existing, stash)

    def _enter_pending(self, pending: _Pending, scaler: LossScaler) -> None:
        scaled = self._scaled_gradients()
        if pending.scaler is not scaler or pending.version != scaler.version:
            _gradients.multiply_(scaled, scaler.scale * pending.inverse)
            self._pending = _Pending(scaler, pending.why)
        self._entry = _Entry(scaled)

    def _scaled_gradients(self) -> list[torch.Tensor]:
        return [g for p in self.model_params() if (g := p.grad) is not None]

    def abandon(self, scaler: LossScaler) -> None:
        """The body raised. Gradients nobody touched become what they were; a half-done backward is dropped whole."""
        self.open = False
        entry, self._entry = self._entry, _Entry()
        if self._pending is not None:
            if not entry.untouched(self._scaled_gradients()):
                self._drop_gradients()
            return
        for param, _ in self.pairs:
            param.grad = None
        if not entry.untouched([g for p in self.plain if (g := p.grad) is not None]):
            self._drop_gradients()
        elif entry.stash is not None:
            _gradients.add_(entry.to_put_back())
        elif entry.grads and self.engine.policy.scales:
            _gradients.multiply_(entry.grads, scaler.inverse)
        if self._witness is not None:
            self._witness.leave()

    def _drop_gradients(self) -> None:
        for param in (*self.model_params(), *self._stepped()):
            param.grad = None
        self._pending = None
        self._ready = False
        self._mixed = False

    def cleared(self) -> None:
        """``optimizer.zero_grad()`` was called: what waits elsewhere goes too, and a backward has to come anew."""
        self._ready = False
        for param, _ in self.pairs:
            param.grad = None
        if self._entry.stash is not None:
            self._entry = _NOTHING

    def postpone(self, scaler: LossScaler, why: str) -> None:
        """Leave the gradients scaled and where they are, until a later ``scale_loss``."""
        self.open = False
        if self._entry.stash is not None:  # nothing will be there to put it back: it joins what is scaled
            back = self._entry.to_put_back()
            _gradients.multiply_([old for _, old in back], scaler.scale)
            _gradients.add_(back)
            self._mixed = True
        self._entry = _Entry()
        self._pending = _Pending(scaler, why)

    def unscale(self, scaler: LossScaler, found_inf: torch.Tensor | None) -> None:
        """Unscale the gradients of the backward that just ended.

        Args:
            scaler: the scale they have.
            found_inf: fp32, one element, raised to 1.0 if one is not finite; None: not looked at.
        """
        self.open = False
        self._pending = None
        self._used.add(scaler.index)
        grads = [g for p in self.plain if (g := p.grad) is not None]
        if self.engine.policy.scales:
            self._unscale_list(grads, scaler, found_inf, self.plain)
        moved = bool(self.pairs) and self._move_to_masters(scaler, found_inf)
        if self._entry.stash is not None:
            self._put_stash_back(found_inf)
        self._entry = _NOTHING
        self._ready = self._ready or bool(grads) or moved

    def _move_to_masters(self, scaler: LossScaler, found_inf: torch.Tensor | None) -> bool:
        """Gradients go from the lowered parameters to the masters; whether there was any."""
        if self.fresh and found_inf is not None:
            self._check_left_over([g for _, m in self.pairs if (g := m.grad) is not None], found_inf)
        moved = _masters.transfer(self.pairs, self._finisher(scaler, found_inf))
        if self._witness is not None:
            self._witness.leave()
        if self.fused.active and any(m.grad is not None and m.grad.is_sparse for _, m in self.pairs):
            self.fused.met_sparse(self.optimizer)
        return moved

    def _put_stash_back(self, found_inf: torch.Tensor | None) -> None:
        """Add the gradients that were put aside."""
        back = self._entry.to_put_back()
        if self.fresh and found_inf is not None:
            self._check_left_over([old for _, old in back], found_inf)
        _gradients.add_(back)

    def _check_left_over(self, grads: list[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Find what is not finite in gradients that were not cleared after the last, perhaps skipped, step."""
        if grads:
            one = torch.ones_like(found_inf)
            _gradients.unscale_by_group_(grads, found_inf, one, self.engine.backend.unscale_)

    def _finisher(self, scaler: LossScaler, found: torch.Tensor | None) -> Callable[[list[torch.Tensor]], None] | None:
        if not self.engine.policy.scales:
            return None
        return lambda grads: self._unscale_list(grads, scaler, found)

    def _unscale_list(
        self,
        grads: list[torch.Tensor],
        scaler: LossScaler,
        found_inf: torch.Tensor | None,
        params: Sequence[torch.Tensor] = (),
    ) -> None:
        if not grads:
            return
        if found_inf is None:
            _gradients.multiply_(grads, scaler.inverse)
            return
        unscale_ = self.engine.backend.unscale_
        if self._uniform:
            try:
                unscale_(grads, found_inf, scaler.inverse)
                return
            except (RuntimeError, NotImplementedError):
                # Sparse and complex gradients are refused before anything is changed; looking for them first costs
                # 10 us at 300.
                if not any(g.is_sparse or g.is_complex() for g in grads):
                    raise
        if any(g.is_sparse for g in grads):
            self.fused.met_sparse(self.optimizer)
            _gradients.coalesce_half(params)
            grads = [p.grad for p in params if p.grad is not None] or grads
        _gradients.unscale_by_group_(grads, found_inf, scaler.inverse, unscale_)

    def keep_flag(self) -> None:
        """Fold what this backward found into the sticky flag, and take out of it what an earlier one found."""
        if self._mixed:
            self.flag.addcmul_(self.flag, self.sticky, value=-1)
        torch.maximum(self.sticky, self.flag, out=self.sticky)

    def checked(self) -> None:
        """The sticky flag now says something of the gradients there are."""
        self.fresh = False
        self._mixed = False

    # ---------------------------------------------------------------- step

    def settle(self, call: str) -> None:
        """Called before anything reads or steps the gradients.

        Raises:
            StateError: they are still scaled.
        """
        if self.open:
            raise StateError(f"{call}: inside `with xamp.scale_loss(...)` of this optimizer. Call it after the block.")
        if self._witness is not None:
            self._witness.check()
        if self._pending is not None:
            if self._scaled_gradients():
                raise StateError(
                    f"{call}: the gradients are still scaled, because {self._pending.why}. Run a scale_loss over this "
                    "optimizer that unscales them first."
                )
            self._pending = None

    def step(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``optimizer.step(*args, **kwargs)``; ``base`` is the optimizer's own.

        Raises:
            StateError: a closure under loss scaling, gradients still scaled, or a backward without ``scale_loss``.
            LossScaleCollapsed: :data:`xamp._scale.COLLAPSE_RUN` overflows in a row that no smaller scale could cure.
        """
        policy = self.engine.policy
        if not policy.scales and not policy.master_weights:
            result = base(*args, **kwargs)
            self._finish(StepOutcome.APPLIED)
            return result
        self._refuse(args, kwargs)
        if not self._ready:  # no gradients at all, or it would have been refused
            return base(*args, **kwargs)
        if not policy.checks:
            fused = not self.fused.active or self._is_warm()
            result = (base if fused else self._warming(base))(*args, **kwargs)
            self._finish(StepOutcome.APPLIED)
            return result
        warming = skips_on_device(self.optimizer)
        if warming and self._is_warm():
            return self._step_on_device(base, args, kwargs)
        return self._step_on_host(self._warming(base) if warming else base, args, kwargs)

    def _warming(self, base: Callable[..., Any]) -> Callable[..., Any]:
        """``base`` without the fused form, which for a parameter's first step some kernels lack (see _is_warm)."""

        def step(*args: Any, **kwargs: Any) -> Any:
            with self.fused.off(self.optimizer):
                result = base(*args, **kwargs)
            self._warm.update(id(p) for p in self._stepped() if p.grad is not None)
            self._warm_states = len(self.optimizer.state)
            return result

        return step

    def _step_on_host(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values = self.engine.memory.values.tolist()  # the one wait for the device
        result, outcome = None, StepOutcome.SKIPPED
        if not self.engine.memory.overflowed(values, self.index):
            result, outcome = base(*args, **kwargs), StepOutcome.APPLIED
        used = tuple(self._used) if outcome is StepOutcome.SKIPPED else ()
        for scaler in self.engine.scalers:
            scaler.know(values[scaler.index])
        self._finish(outcome)
        self._observe(used, values)
        return result

    def _step_on_device(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, self.sticky
        try:
            result = base(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        readable = list(self._history.push(tuple(self._used)))
        self._finish(self.sticky.clone())
        for used, values in readable:
            self._observe(used, values)
        return result

    def _is_warm(self) -> bool:
        """Whether every parameter about to move has its state.

        torch's fused SGD makes momentum buffers of uninitialised memory on a step that ``found_inf`` skips, and fails
        where one parameter has a buffer and another none; the others leave zeros where there was nothing. So the first
        step of a parameter is decided on the host, and taken by the form that the user left it in.
        """
        if len(self.optimizer.state) < self._warm_states:
            self._warm.clear()
        if len(self._warm) == self._size:
            return True
        return self._warm.issuperset(id(p) for p in self._stepped() if p.grad is not None)

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            raise StateError(
                f"{type(self.optimizer).__name__}.step(closure): under loss scaling or master weights (level "
                f"{self.engine.policy.level}) a closure would run backward without them. Compute the loss before "
                "step(), in scale_loss; an optimizer that needs a closure (LBFGS) works at levels O0 and O4."
            )
        self.settle("optimizer.step()")
        witness = self._witness
        stray = not self._ready and any(p.grad is not None for p in self._stepped())
        if stray or (witness and any(p.grad is not None for p, _ in self.pairs if not witness.holds(p))):
            raise StateError(
                "optimizer.step(): there are gradients that did not come through scale_loss since the last step. Run "
                "every backward() as `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, inside the "
                "with block, and clear the gradients with optimizer.zero_grad() after a step."
            )

    def _finish(self, outcome: StepOutcome | torch.Tensor) -> None:
        """The step is over: masters go back, the flags go down."""
        self.outcome = outcome
        if outcome is not StepOutcome.SKIPPED:
            _masters.copy_back(self.pairs)
        if not self.engine.policy.checks:
            self.engine.counts.applied += 1
        elif not self.fresh and outcome is not StepOutcome.APPLIED:  # where the host applied, it has read a zero
            self.sticky.zero_()
        self.fresh = True
        self._ready = False
        self._mixed = False
        self._used.clear()

    def unobserved(self) -> Iterable[bool]:
        """Whether each step overflowed that has not been counted yet. Waits for the device."""
        for _, values in self._history.peek():
            yield self.engine.memory.overflowed(values, self.index)

    def _observe(self, used: Sequence[int], values: Sequence[float]) -> None:
        """Count, log and judge one step whose numbers the host has."""
        memory, stats = self.engine.memory, self.engine.counts
        overflowed, scales = memory.overflowed(values, self.index), memory.scales_in(values)
        if not overflowed:
            self._watch.clean(scales)
            stats.applied += 1
            return
        collapsed = self._watch.collapsed(scales, used)
        stats.skipped += 1
        if self.engine.verbosity:
            say("gradient overflow: step skipped, loss scale %s", ", ".join(f"{scales[i]:g}" for i in used))
        if collapsed:
            raise LossScaleCollapsed(self._collapse_message(scales, used))

    def _collapse_message(self, scales: Sequence[float], used: Sequence[int]) -> str:
        policy = self.engine.policy
        at = ", ".join(f"{scales[i]:g}" for i in used)
        kind = f"at its floor (min_loss_scale={policy.min_loss_scale:g})" if policy.dynamic else "static"
        bad = [
            p for p in self._stepped() if p.grad is not None and not bool(_gradients.values(p.grad).isfinite().all())
        ]
        names = self.engine.names_of(bad)
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (
            f"optimizer.step(): {COLLAPSE_RUN} overflows in a row with the loss scale {at}, {kind}: no smaller scale "
            f"will cure it. Gradients that are not finite: {listed or 'none at this moment'}. Look for a division, log "
            "or exp there, lower the learning rate, keep the module in fp32 (keep_fp32), or use bfloat16 (O4, O5)."
        )
