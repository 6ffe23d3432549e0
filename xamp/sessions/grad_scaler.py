"""``GradScaler``: the interface of torch.cuda.amp's over the engine that serves ``initialize`` too.

Here is what it accepts, refuses and remembers; :mod:`xamp.sessions.manual_engine` has the engine, made on the device of
the first
loss: ``unscale_`` raises an optimizer's flag, ``step`` is decided by it, ``update`` moves the scale by all flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.ground.arguments import boolean, number_between
from xamp.policy import LARGEST_SCALE, SCALER_RANGES, SMALLEST_SCALE, Request
from xamp.scaling.scale import LossScaler, ScaleRules
from xamp.scaling.step import Stats, StepOutcome
from xamp.sessions import formats
from xamp.sessions.manual_engine import ManualEngine, Stage, has_nothing_to_do

__all__ = ["GradScaler"]

# torch's methods that the engine does not call: a subclass that has its own would be ignored without a word.
_NOT_CALLED = ("_check_inf_per_device", "_maybe_opt_step", "_unscale_grads_")


class _NothingChecked(StateError, AssertionError):
    """What torch asserts."""


class _BadFactor(PolicyError, AssertionError):
    """What torch asserts of an argument."""


class _EmptyState(CheckpointError, RuntimeError):
    """What torch calls a RuntimeError."""


class GradScaler:
    """Loss scaling by hand, with the methods, names and numbers of ``torch.cuda.amp.GradScaler``, on any device.

    ::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # where gradients are clipped or looked at
        scaler.step(optimizer)
        scaler.update()

    Beyond torch's: the scale has a floor; a run of overflows at it raises; :attr:`last_step` and :attr:`stats` tell
    what was skipped; a chip that saturates instead of giving inf is asked for its flag; and ranks whose gradients are
    not the same by themselves (sharded parameters, such chips) skip together.

    Args:
        init_scale: loss scale at the start.
        growth_factor: what it is multiplied by after ``growth_interval`` updates without inf and nan.
        backoff_factor: what it is multiplied by when there were some.
        growth_interval: number of updates.
        enabled: False, or what counts as false: every method passes through.

    Attributes:
        process_group: ranks that decide together; None: the default group where there is one.

    Raises:
        PolicyError: a number out of its range.
    """

    process_group: Any = None
    _floor: float = Request.min_loss_scale
    _ceiling: float = LARGEST_SCALE

    def __init__(
        self,
        init_scale: float = Request.init_scale,
        growth_factor: float = Request.growth_factor,
        backoff_factor: float = Request.backoff_factor,
        growth_interval: int = Request.growth_interval,
        enabled: bool = True,
    ) -> None:
        spelt: object = enabled
        self._enabled = boolean("enabled", spelt, call="GradScaler") is True if isinstance(spelt, str) else bool(spelt)
        self._init_scale, self._growth_interval = init_scale, growth_interval
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        if self._enabled:  # torch looks at nothing where it does nothing
            self._check_arguments()
        self._init_growth_tracker = 0
        self._lowest_set = self._init_scale
        self._engine: ManualEngine | None = None  # made when the device is known

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [name for name in _NOT_CALLED if name in cls.__dict__]
        if own:
            raise PolicyError(
                f"class {cls.__name__}(GradScaler): overrides {', '.join(own)}, which this scaler does not call. "
                "Override scale, unscale_, step or update instead."
            )

    def _check_arguments(self) -> None:
        given: object = self._init_scale
        if isinstance(given, str) and given.partition(":")[0].isalpha():
            raise PolicyError(
                f"GradScaler(init_scale={given!r}): must be a number. Leave torch.amp's device out: the scale "
                "goes where the first loss is."
            )
        self._init_scale = _number("init_scale", self._init_scale)
        try:
            self._growth_factor = _number("growth_factor", self._growth_factor)
            self._backoff_factor = _number("backoff_factor", self._backoff_factor)
        except PolicyError as error:
            raise _BadFactor(str(error)) from None
        self._growth_interval = int(_number("growth_interval", self._growth_interval))

    # ---------------------------------------------------------------- the step

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of a nested list, tuple or iterable of tensors, by the scale.

        Raises:
            PolicyError: something in it is no tensor.
        """
        return self._multiply(outputs) if self._enabled else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and look for inf and nan. ``step`` does it where needed.

        Raises:
            StateError: it was called since the last ``update``, or the optimizer has stepped since.
            PolicyError: there are fp16 gradients, whose small values unscaling would lose.
        """
        if not self._enabled:
            return
        engine = self._require("unscale_")
        use = engine.use_of(optimizer, "unscale_")
        if use.stage is Stage.UNSCALED:
            raise StateError("unscale_() has already been called on this optimizer since the last update().")
        if use.stage is Stage.STEPPED:
            raise StateError("unscale_() is being called after step().")
        if any((g := p.grad) is not None and g.dtype is torch.float16 for p in use.state.gradients.stepped):
            raise PolicyError(
                "Attempting to unscale FP16 gradients. GradScaler wants fp32 parameters: leave the model in fp32 and "
                "use autocast, or let xamp.initialize(model, optimizer, level='O2') keep fp32 masters of an fp16 one."
            )
        engine.unscale(use)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step(*args, **kwargs)`` unless its gradients hold inf or nan.

        Returns:
            What ``optimizer.step`` returns; None where it is skipped.

        Raises:
            StateError: called twice since the last ``update``, with a closure, or without any gradient (which a fused
                optimizer may be).
            LossScaleCollapsed: 50 overflows in a row at the floor.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        use = self._require("step").use_of(optimizer, "step")
        if use.stage is Stage.STEPPED:
            raise StateError("step() has already been called since the last update().")
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError("Closure use is not currently supported if GradScaler is enabled.")
        if use.stage is Stage.READY:
            self.unscale_(optimizer)
        if not use.checked and not has_nothing_to_do(use, optimizer):
            raise _NothingChecked(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient: run "
                "scaler.scale(loss).backward() on a loss that depends on them first."
            )
        try:
            return use.state.step(optimizer.step, args, kwargs) if use.checked else optimizer.step(*args, **kwargs)
        finally:
            if not use.state.gradients.ready:  # else the optimizer raised before the step was over
                use.stage = Stage.STEPPED
            if use.state.outcome is StepOutcome.SKIPPED and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler asks before it warns

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what was found since the last update, or set it.

        Args:
            new_scale: the scale, a number, or a tensor of one element that needs no gradient (which waits for the
                device). It lowers the floor where it is below it, and is cut at the ceiling.

        Raises:
            StateError: nothing was checked since the last update.
            PolicyError: ``new_scale`` is no finite number above 0.
        """
        if not self._enabled:
            return
        engine = self._require("update")
        if new_scale is not None:
            number = _number("new_scale", _one_element(new_scale))
            self._lowest_set = min(self._lowest_set, number)
            self._follow_rules(engine.scaler)
            engine.scaler.fill(engine.scaler.rules.within(number))
        elif not engine.checked:
            raise _NothingChecked("No inf checks were recorded prior to update. Call scaler.step(optimizer) first.")
        else:
            self._follow_rules(engine.scaler)
            engine.move()
        engine.finish()

    # ---------------------------------------------------------------- what it knows

    @property
    def last_step(self) -> Any:
        """What the last ``step`` did: a StepOutcome, None before the first. May wait for the device.

        With several optimizers: a dict by optimizer.
        """
        return None if self._engine is None else self._engine.last_step()

    @property
    def stats(self) -> Stats:
        """Counts of steps, over all optimizers. Waits for the device."""
        return Stats() if self._engine is None else self._engine.stats()

    def get_scale(self) -> float:
        """The scale, 1.0 where disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._rules().within(self._init_scale) if self._engine is None else float(self._engine.scaler.scale)

    @property
    def min_loss_scale(self) -> float:
        """Floor of the scale; may be set. A smaller ``init_scale``, ``new_scale`` or loaded scale lowers it."""
        return self._floor

    @min_loss_scale.setter
    def min_loss_scale(self, floor: float) -> None:
        self._floor = _number("min_loss_scale", floor)

    @property
    def max_loss_scale(self) -> float:
        """Ceiling of the scale; may be set, and counts from the next ``update`` on. The default is what fp32 holds."""
        return self._ceiling

    @max_loss_scale.setter
    def max_loss_scale(self, ceiling: float) -> None:
        self._ceiling = _number("max_loss_scale", ceiling)

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set it; 1 stops the growth."""
        self._growth_factor = _number("growth_factor", new_factor, low=0)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by on an overflow."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set it."""
        self._backoff_factor = _number("backoff_factor", new_factor, high=LARGEST_SCALE)

    def get_growth_interval(self) -> int:
        """Number of clean updates after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set it."""
        self._growth_interval = int(_number("growth_interval", new_interval))

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's GradScaler has it; empty where disabled. Waits for the device."""
        if not self._enabled:
            return {}
        factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
        saved = formats.SavedScale(self.get_scale(), self._get_growth_tracker(), True, factors)
        return formats.write_foreign(saved, "torch")

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of this GradScaler, torch's or torch_npu's, or that of one scaler of apex.amp or xamp.

        Raises:
            CheckpointError: it does not fit; the message names the key, and nothing was changed.
        """
        if not self._enabled:
            return
        call = "GradScaler.load_state_dict(state)"
        if isinstance(state_dict, dict) and not state_dict:
            raise _EmptyState(
                f"{call}: The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler."
            )
        scales = formats.read(call, state_dict).scales
        if len(scales) != 1:
            raise CheckpointError(f"{call}: it holds {len(scales)} loss scales, and a GradScaler has one.")
        (saved,) = scales
        if saved.dynamic is False:
            self._growth_factor = self._backoff_factor = 1.0
        elif saved.factors is not None:
            self._growth_factor, self._backoff_factor, self._growth_interval = saved.factors
        self._init_scale = max(saved.scale, SMALLEST_SCALE)  # of a collapsed run's the inverse may be inf
        # It grows where the count equals the interval: never again, were the count beyond it.
        self._init_growth_tracker = max(min(saved.growth_tracker, self._growth_interval - 1), 0)
        self._lowest_set = min(self._lowest_set, self._init_scale)
        if self._engine is not None:
            self._set_start(self._engine)
            self._engine.outdate_losses()

    def __getstate__(self) -> dict[str, Any]:
        uses = () if self._engine is None else self._engine.uses.values()
        if any(use.stage is not Stage.READY for use in uses):
            raise _NothingChecked(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        state = {**self.__dict__, "_engine": None}
        state.pop("process_group", None)  # lives in this process only
        if self._engine is not None:
            state.update(_init_scale=self.get_scale(), _init_growth_tracker=self._get_growth_tracker())
        return state

    # ---------------------------------------------------------------- for subclasses, under torch's names

    @property
    def _scale(self) -> torch.Tensor | None:
        """The scale on the device, writable; None before the first loss."""
        return None if self._engine is None else self._engine.scaler.factor

    @_scale.setter
    def _scale(self, scale: float | torch.Tensor) -> None:
        number = _number("_scale", _one_element(scale))
        self._lowest_set = min(self._lowest_set, number)
        if self._engine is None:
            self._init_scale = number
        else:
            self._follow_rules(self._engine.scaler)
            self._engine.scaler.fill(number)

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        """The flag of ``optimizer``, 1.0 where something overflowed: live, so that ranks can share it before a step."""
        engine = self._require("_found_inf_per_device")
        return {engine.device: engine.use_of(optimizer, "_found_inf_per_device").state.sticky}

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        """Clean updates since the scale moved, on the device; None before the first loss."""
        return None if self._engine is None else self._engine.scaler.growth_tracker

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._engine is None else int(self._engine.scaler.growth_tracker)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the engine on ``dev``."""
        if self._engine is not None:
            raise _NothingChecked("GradScaler: _scale and _growth_tracker are there already.")
        engine = ManualEngine(torch.device(dev), self.process_group)
        self._set_start(engine)
        self._engine = engine

    # ---------------------------------------------------------------- inside

    def _multiply(self, outputs: Any) -> Any:
        """See :meth:`scale`, which a subclass may have made its own."""
        if isinstance(outputs, torch.Tensor):
            factor = self._begin(outputs.device)
            return outputs * (factor if outputs.device == factor.device else factor.to(outputs.device))
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes)):
            raise PolicyError(
                f"GradScaler.scale(outputs): must be a tensor or an iterable of tensors, and there is a "
                f"{type(outputs).__name__}."
            )
        scaled = map(self._multiply, outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _begin(self, device: torch.device) -> torch.Tensor:
        """Before a loss is scaled: what to multiply it by."""
        if self._engine is None:
            self._lazy_init_scale_growth_tracker(device)
            assert self._engine is not None, "made in the line above"
        self._engine.process_group = self.process_group
        self._engine.begin()
        return self._engine.scaler.factor

    def _require(self, call: str) -> ManualEngine:
        if self._engine is None:
            raise _NothingChecked(
                f"Attempted {call} but _scale is None. This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        self._engine.notice_writes()
        return self._engine

    def _set_start(self, engine: ManualEngine) -> None:
        """Give ``engine`` the scale that was asked for or loaded, after so many clean updates."""
        self._follow_rules(engine.scaler)
        engine.scaler.set(engine.scaler.rules.within(self._init_scale), self._init_growth_tracker)

    def _rules(self) -> ScaleRules:
        floor = min(self.min_loss_scale, self._lowest_set)
        factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
        return ScaleRules(True, *factors, floor, max(self.max_loss_scale, floor))

    def _follow_rules(self, scaler: LossScaler) -> None:
        """Tell the loss scale how to move, where that has changed."""
        rules = self._rules()
        if rules != scaler.rules:
            scaler.follow(rules)


def _number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """A number in the range that ``initialize`` has for it, a scale in that of fp32; the bounds replace the range's."""
    least, most, whole = (SMALLEST_SCALE, LARGEST_SCALE, False) if name.endswith("_scale") else SCALER_RANGES[name]
    return number_between(
        name, value, least if low is None else low, most if high is None else high, whole=whole, call="GradScaler"
    )


def _one_element(value: float | torch.Tensor) -> object:
    """The number that ``update`` was given."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise PolicyError(
            f"GradScaler.update(new_scale): must be a number or a tensor of one element that needs no gradient, and is "
            f"one of shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    return value.item()
