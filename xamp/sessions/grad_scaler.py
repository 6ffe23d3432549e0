"""``GradScaler``: torch's own, on the engine that serves ``initialize`` too.

It is a subclass of torch's oldest GradScaler: scripts and libraries ask ``isinstance``, and private methods that a
user's subclass overrides are called as torch calls them. The engine (:mod:`xamp.sessions.manual_engine`) is made on the
device of the first loss. ``unscale_`` raises the flag of an optimizer, ``step`` skips if that flag is raised, and
``update`` moves the scale by the flags of all optimizers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.cuda.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from xamp.distributed import ranks
from xamp.distributed.rank_settings import ScalerSettings
from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.ground.arguments import boolean, number_between
from xamp.ground.compiler import eager_by_rule
from xamp.plans.trials import honours_found_inf
from xamp.policy import LARGEST_SCALE, SCALER_RANGES, SMALLEST_SCALE, Request
from xamp.registry import device_in_use
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.optimizer import bound_step
from xamp.scaling.scale import LossScaler, ScaleRules
from xamp.scaling.step import OptimizerState
from xamp.sessions import formats, metrics
from xamp.sessions.manual_engine import ManualEngine, Use, sharing

__all__ = ["GradScaler"]


class NothingChecked(StateError, AssertionError):
    """An error that torch's GradScaler raises as an AssertionError."""


class BadFactor(PolicyError, AssertionError):
    """A wrong factor, for which torch's GradScaler raises an AssertionError."""


class EmptyState(CheckpointError, RuntimeError):
    """An empty state, for which torch's GradScaler raises a RuntimeError."""


def _also_as_in_torch_amp(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``GradScaler.__init__`` take a device first, as torch.amp's does, or as ``device=``."""

    @functools.wraps(init)
    def either(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        if args and device_in_use.names_device(args[0]):
            if device is not None:
                raise PolicyError(f"GradScaler({args[0]!r}, device={device!r}): names a device twice.")
            device, args = args[0], args[1:]
        init(self, *args, **kwargs)
        if device is not None and self._enabled:
            device_in_use.require_in_use("GradScaler", device)

    return either


def _unused() -> Use:
    return {"stage": OptState.READY, "found_inf_per_device": {}, "state": None}


class GradScaler(TorchGradScaler):
    """Scales losses by hand, with the methods, names and numbers of ``torch.cuda.amp.GradScaler``, on any device.

    ::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # only to clip or read gradients before the step
        scaler.step(optimizer)
        scaler.update()

    It does more than torch's scaler. The scale has a floor, and a run of overflows at the floor raises an error.
    :attr:`last_step` and :attr:`stats` tell which steps were skipped. On a chip that saturates instead of giving inf,
    the scaler reads the chip's overflow flag. Ranks whose gradients are not equal anyway (sharded parameters, or such a
    chip) skip together. The type of the device in use may be given as to torch.amp's: ``GradScaler("cuda")`` and
    ``device="cuda"``.

    Args:
        init_scale: loss scale at the start.
        growth_factor: the scale is multiplied by it after ``growth_interval`` updates in a row without inf and nan.
        backoff_factor: the scale is multiplied by it at an update where there was inf or nan.
        growth_interval: number of updates.
        enabled: False, or any value that counts as false: ``scale`` returns its argument, ``step`` calls
            ``optimizer.step``, and ``unscale_`` and ``update`` do nothing.

    Attributes:
        process_group: ranks that decide together; None: those that share sharded gradients, of FSDP1 and on a chip that
            saturates the default group.

    Raises:
        PolicyError: a number is out of its range, or the device named is not the device in use.
    """

    process_group: Any = None
    _published: ScalerSettings | None = None  # of a scaler that is switched off
    _floor: float = Request.min_loss_scale
    _ceiling: float = LARGEST_SCALE

    @_also_as_in_torch_amp
    def __init__(
        self,
        init_scale: float = Request.init_scale,
        growth_factor: float = Request.growth_factor,
        backoff_factor: float = Request.backoff_factor,
        growth_interval: int = Request.growth_interval,
        enabled: bool = True,
    ) -> None:
        # torch's own __init__ warns that its name is old, and switches itself off where that name's device is missing.
        wanted: object = enabled
        self._enabled = bool(boolean("enabled", wanted, call="GradScaler") if isinstance(wanted, str) else wanted)
        self._init_scale, self._growth_interval = init_scale, growth_interval
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        if self._enabled:  # torch checks no argument of a disabled scaler
            self._init_scale = _number("init_scale", init_scale)
            try:
                self._growth_factor = _number("growth_factor", growth_factor)
                self._backoff_factor = _number("backoff_factor", backoff_factor)
            except PolicyError as error:
                raise BadFactor(str(error)) from None
            self._growth_interval = int(_number("growth_interval", growth_interval))
        self._init_growth_tracker = 0
        self._lowest_set = self._init_scale
        self._engine: ManualEngine | None = None  # made when the device is known
        self._per_optimizer_states: defaultdict[int, Use] = defaultdict(_unused)

    # ---------------------------------------------------------------- the step

    @eager_by_rule
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor in a nested list, tuple or iterable, by the scale.

        Raises:
            PolicyError: ``outputs`` holds something that is not a tensor.
        """
        return self._multiply(outputs) if self._enabled else outputs

    @eager_by_rule
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale and check them for inf and nan.

        ``step`` calls this itself if the user did not.

        Raises:
            StateError: it was already called for this optimizer, or the optimizer has stepped, since the last
                ``update``.
            PolicyError: there are fp16 gradients, whose small values would be lost in unscaling.
        """
        if not self._enabled:
            return
        engine = self._require("unscale_")
        state, use = self._use(engine, optimizer, "unscale_")
        if use["stage"] is OptState.UNSCALED:
            raise StateError("unscale_() has already been called on this optimizer since the last update().")
        if use["stage"] is OptState.STEPPED:
            raise StateError("unscale_() is being called after step().")
        if any((g := p.grad) is not None and g.dtype is torch.float16 for p in state.gradients.stepped):
            raise PolicyError(
                "Attempting to unscale FP16 gradients. GradScaler wants fp32 parameters: leave the model in fp32 and "
                "use autocast, or let xamp.initialize(model, optimizer, level='O2') keep fp32 masters of an fp16 one."
            )
        found = self._unscale_grads_(optimizer, engine.scaler.inverse, state.found_inf_since_step, False)
        if found is not use["found_inf_per_device"]:
            engine.record_flags(state, use, found)

    @eager_by_rule
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step(*args, **kwargs)`` unless its gradients hold inf or nan.

        Returns:
            What ``optimizer.step`` returns; None where the step is skipped.

        Raises:
            StateError: called twice since the last ``update``, or with a closure, or without any gradient (a fused
                optimizer may step without one).
            LossScaleCollapsed: 50 overflows in a row at the floor.
            PolicyError: another rank has a scaler of other settings for the same optimizer.
        """
        if not self._enabled:
            if ranks.is_running() and self._published is None:
                self._published = ScalerSettings()
                params = [p for group in optimizer.param_groups for p in group["params"]]
                self._published.publish_disabled(sharing(self.process_group, params), params)
            return optimizer.step(*args, **kwargs)
        state, use = self._use(self._require("step"), optimizer, "step")
        if use["stage"] is OptState.STEPPED:
            raise StateError("step() has already been called since the last update().")
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError("Closure use is not currently supported if GradScaler is enabled.")
        if use["stage"] is OptState.READY:
            self._check_before_step(optimizer, state)
        nothing = not use["found_inf_per_device"]
        if nothing and not (honours_found_inf(optimizer) and all(p.grad is None for p in state.gradients.stepped)):
            raise NothingChecked(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient: run "
                "scaler.scale(loss).backward() on a loss that depends on them first."
            )
        try:
            if nothing:
                state.outcomes.last = None
                return bound_step(optimizer.step)(*args, **kwargs)
            if state.fused.skips_on_device:  # torch calls _maybe_opt_step where the host decides
                return state.step(bound_step(optimizer.step), args, kwargs)
            result = self._maybe_opt_step(optimizer, use, *args, **kwargs)
            if state.gradients.ready:  # a method of a subclass has stepped or skipped, by the same flag
                state.step(lambda: None, (), {})
            return result
        finally:
            if not state.gradients.ready:  # still ready: the optimizer raised before the step was over
                use["stage"] = OptState.STEPPED
            if state.outcomes.last is StepOutcome.SKIPPED and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler reads it, and else warns

    def _check_before_step(self, optimizer: Optimizer, state: OptimizerState) -> None:
        """Unscale, as ``step`` does where the user did not; let a check of a user's subclass count too."""
        earlier: Any = {}
        if state.fused.skips_on_device and type(self)._check_inf_per_device is not GradScaler._check_inf_per_device:
            earlier = self._check_inf_per_device(optimizer)
        self.unscale_(optimizer)
        if earlier:
            self._require("step").record_flags(state, self._per_optimizer_states[id(optimizer)], earlier)

    @eager_by_rule
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Back off or grow the scale by the checks since the last update; or set it to ``new_scale``.

        Args:
            new_scale: the new scale: a number, or a tensor of one element that needs no gradient (reading it waits for
                the device). A value below the floor lowers the floor. A value above the ceiling becomes the ceiling.

        Raises:
            StateError: no gradient was checked since the last update.
            PolicyError: ``new_scale`` is not a finite number above 0.
        """
        if not self._enabled:
            return
        engine = self._require("update")
        if new_scale is not None:
            self._set_scale("new_scale", new_scale)
        else:
            uses = self._per_optimizer_states.values()
            flags = [flag for use in uses for flag in use["found_inf_per_device"].values()]
            if not (flags or engine.checked):
                raise NothingChecked("No inf checks were recorded prior to update. Call scaler.step(optimizer) first.")
            self._follow_rules(engine.scaler)
            engine.move(flags)
        self._per_optimizer_states = defaultdict(_unused)
        engine.finish()  # last: where this is interrupted, it runs again, and the scale has moved

    # ---------------------------------------------------------------- what it knows

    @property
    def last_step(self) -> Any:
        """Outcome of the last ``step``, as :attr:`xamp.sessions.session.Session.last_step`. May wait for the device."""
        return None if self._engine is None else self._engine.last_step()

    @property
    def stats(self) -> Stats:
        """Counts of steps, as :attr:`xamp.sessions.session.Session.stats`. Waits for the device."""
        if self._engine is None:
            return Stats()
        self._engine.judge_replays()
        return self._engine.stats()

    @eager_by_rule
    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return Python numbers for a logger, as :meth:`xamp.sessions.session.Session.metrics` does.

        Where the device decides on steps and is not waited for (``wait``), growth of the scale shows one step later.
        """
        if not self._enabled or self._engine is None:
            return metrics.collect(None, (), wait=wait, scale=self.get_scale())
        states = self._engine.states
        ready = any(self._per_optimizer_states[id(each.optimizer)]["stage"] is OptState.READY for each in states)
        return metrics.collect(self._engine, states, wait=wait, scaled=self._engine.began and ready)

    def get_scale(self) -> float:
        """Return the scale; 1.0 where disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._rules().within(self._init_scale) if self._engine is None else float(self._engine.scaler.scale)

    @property
    def min_loss_scale(self) -> float:
        """Floor of the scale. It can be set. A smaller ``init_scale``, ``new_scale`` or loaded scale lowers it."""
        return self._floor

    @min_loss_scale.setter
    def min_loss_scale(self, floor: float) -> None:
        self._floor = _number("min_loss_scale", floor)

    @property
    def max_loss_scale(self) -> float:
        """Ceiling of the scale. It can be set, with effect from the next ``update``. Default: fp32's largest number."""
        return self._ceiling

    @max_loss_scale.setter
    def max_loss_scale(self, ceiling: float) -> None:
        self._ceiling = _number("max_loss_scale", ceiling)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor to ``new_factor``, which is above 0. A factor of 1 stops the growth."""
        self._growth_factor = _number("growth_factor", new_factor, low=0)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor to ``new_factor``."""
        self._backoff_factor = _number("backoff_factor", new_factor, high=LARGEST_SCALE)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval to ``new_interval``, a number of clean updates."""
        self._growth_interval = int(_number("growth_interval", new_interval))

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of this GradScaler, of torch's or torch_npu's, or of apex.amp or xamp with one loss scale.

        Args:
            state_dict: the state; it is not kept.

        Raises:
            CheckpointError: the state does not fit. The message names the key, and nothing was changed.
        """
        if not self._enabled:
            return
        call = "GradScaler.load_state_dict(state)"
        if isinstance(state_dict, dict) and not state_dict:
            raise EmptyState(
                f"{call}: The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler."
            )
        scales: list[Any] = formats.read(call, state_dict)["scalers"]
        if len(scales) != 1:
            raise CheckpointError(f"{call}: it holds {len(scales)} loss scales, and a GradScaler has one.")
        saved: formats.ReadScaler = scales[0]
        if saved["dynamic"] is False:
            self._growth_factor = self._backoff_factor = 1.0
        elif "factors" in saved:
            self._growth_factor, self._backoff_factor, self._growth_interval = saved["factors"]
        self._init_scale = max(saved["scale"], SMALLEST_SCALE)  # the inverse of a collapsed run's scale may be inf
        # The scale grows where the tracker equals the interval. With a larger tracker it would never grow again.
        self._init_growth_tracker = max(min(saved["growth_tracker"], self._growth_interval - 1), 0)
        self._lowest_set = min(self._lowest_set, self._init_scale)
        if self._engine is not None:
            self._set_start(self._engine.scaler)
            self._engine.outdate_losses()

    def __getstate__(self) -> dict[str, Any]:
        if any(use["stage"] is not OptState.READY for use in self._per_optimizer_states.values()):
            raise NothingChecked(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        state = {**self.__dict__, "_engine": None, "_per_optimizer_states": defaultdict(_unused)}
        state.pop("process_group", None)  # exists in this process only
        state.pop("_published", None)
        if self._engine is not None:
            state.update(_init_scale=self.get_scale(), _init_growth_tracker=self._get_growth_tracker())
        return state

    # ---------------------------------------------------------------- for subclasses, under torch's names

    @property
    def _scale(self) -> torch.Tensor | None:
        """The scale on the device. It can be written to. None before the first loss."""
        return None if self._engine is None else self._engine.scaler.factor

    @_scale.setter
    def _scale(self, scale: torch.Tensor | None) -> None:
        self._set_scale("_scale", scale)

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        """Clean updates since the scale last moved, on the device. It can be written to. None before the first loss."""
        return None if self._engine is None else self._engine.scaler.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, count: torch.Tensor | None) -> None:
        self._init_growth_tracker = int(count or 0)
        if self._engine is not None:
            self._engine.scaler.growth_tracker.fill_(self._init_growth_tracker)

    @property
    def _device(self) -> str:  # type: ignore[override]  # torch's can be set, to no effect
        """The type of the device, to which torch compares that of a new scale."""
        return device_in_use.device_type() if self._engine is None else self._engine.device.type

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        scaler = self._require(funcname).scaler
        return scaler.factor, scaler.growth_tracker

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale and check; what is called with another scale or flag than the scaler's own, torch does."""
        engine = self._require("_unscale_grads_")
        use = self._per_optimizer_states[id(optimizer)]
        state = use["state"] or engine.state_for(optimizer, "_unscale_grads_")
        if inv_scale is not engine.scaler.inverse or found_inf is not state.found_inf_since_step:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        engine.unscale(state, use)
        return use["found_inf_per_device"]  # type: ignore[no-any-return]

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: Use, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip the step by the flag of the optimizer."""
        state: OptimizerState = optimizer_state["state"]
        return state.step(bound_step(optimizer.step), args, kwargs)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the engine on ``dev``."""
        if self._engine is not None:
            raise NothingChecked("GradScaler: _scale and _growth_tracker are there already.")
        engine = ManualEngine(torch.device(dev), self.process_group)
        self._set_start(engine.scaler)
        self._engine = engine

    # ---------------------------------------------------------------- inside

    def _multiply(self, outputs: Any) -> Any:
        """Do the work of :meth:`scale`. It calls itself for nested outputs, because a subclass may override it."""
        if isinstance(outputs, torch.Tensor):
            if self._engine is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            engine: Any = self._engine
            factor = engine.begin(self.process_group)
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

    def _use(self, engine: ManualEngine, optimizer: Optimizer, call: str) -> tuple[OptimizerState, Use]:
        """Return what the engine keeps of ``optimizer``, and what was called for it since the last ``update``."""
        use, state = self._per_optimizer_states[id(optimizer)], engine.state_for(optimizer, call)
        if use["state"] not in (None, state):  # another optimizer had this id and is gone; its flag counts all the same
            use = self._per_optimizer_states[id(optimizer)] = _unused()
        use["state"] = state
        return state, use

    def _require(self, call: str) -> ManualEngine:
        if self._engine is None:
            raise NothingChecked(
                f"Attempted {call} but _scale is None. This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        self._engine.notice_writes()
        return self._engine

    def _set_start(self, scaler: LossScaler) -> None:
        """Give ``scaler`` the scale and the growth tracker that were given to the constructor or loaded."""
        self._follow_rules(scaler)
        scaler.set(scaler.rules.within(self._init_scale), self._init_growth_tracker)

    def _set_scale(self, name: str, scale: float | torch.Tensor | None) -> None:
        number = _number(name, _one_element(scale))
        self._lowest_set = min(self._lowest_set, number)
        if self._engine is None:
            self._init_scale = number
        else:
            self._follow_rules(self._engine.scaler)
            self._engine.scaler.fill(self._engine.scaler.rules.within(number))

    def _rules(self) -> ScaleRules:
        floor = min(self.min_loss_scale, self._lowest_set)
        factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
        return ScaleRules(True, *factors, floor, max(self.max_loss_scale, floor))

    def _follow_rules(self, scaler: LossScaler) -> None:
        """Give the loss scale new rules, if they have changed."""
        rules = self._rules()
        if rules != scaler.rules:
            scaler.follow(rules)


def _number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """Return ``value`` as a number in bounds. None: fp32's bound where it is a scale, else that of ``initialize``."""
    least, most, whole = (SMALLEST_SCALE, LARGEST_SCALE, False) if name.endswith("_scale") else SCALER_RANGES[name]
    return number_between(
        name, value, least if low is None else low, most if high is None else high, whole=whole, call="GradScaler"
    )


def _one_element(value: float | torch.Tensor | None) -> object:
    """Return the number that ``update`` was given."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise PolicyError(
            f"GradScaler.update(new_scale): must be a number or a tensor of one element that needs no gradient, and is "
            f"one of shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    return value.item()
