"""``GradScaler``: torch's own, with the backend's unscaling, bounds of the scale, and counts of what steps did.

It is a subclass of torch's oldest GradScaler: scripts and libraries ask ``isinstance``, and private methods that a
user's subclass overrides are called as torch calls them. ``_scale``, ``_growth_tracker`` and the flags of an iteration
(``_per_optimizer_states``) are torch's. ``unscale_`` makes a flag for each optimizer, and raises it on all ranks that
decide together. By that flag the kernel of a fused optimizer skips its step, or ``_maybe_opt_step``, which reads it;
``update`` moves the scale by all flags. :class:`xamp.sessions.scaler_steps.ScalerSteps` has the backend and the counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.cuda.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from xamp.casting.active import drop_casts
from xamp.distributed import ranks
from xamp.distributed.rank_settings import ScalerSettings
from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.policy import LARGEST_SCALE, SCALER_RANGES, SMALLEST_SCALE, Request
from xamp.registry import device_in_use
from xamp.registry.fused_classes import honours_found_inf, is_torchs, takes_grad_scaler
from xamp.scaling import unscale
from xamp.scaling.capture import host_step_refusal
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import ScaleRules
from xamp.scaling.torch_step import bound_step
from xamp.sessions import formats, metrics
from xamp.sessions.scaler_steps import OptimizerSteps, ScalerSteps
from xamp.torch_compat.compiler import eager_by_rule
from xamp.values.arguments import boolean, number_between

__all__ = ["GradScaler"]


class NothingChecked(StateError, AssertionError):
    """An error that torch's GradScaler raises as an AssertionError."""


class BadNumber(PolicyError, AssertionError):
    """A wrong number, for which torch's GradScaler raises an AssertionError."""


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
    _steps: Any = None  # a ScalerSteps, made with the scale
    _scale: torch.Tensor | None = None
    _growth_tracker: torch.Tensor | None = None
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
        wanted: object = enabled
        enabled = bool(boolean("enabled", wanted, call="GradScaler") if isinstance(wanted, str) else wanted)
        if enabled:  # torch checks no argument of a disabled scaler
            init_scale = _number("init_scale", init_scale)
            growth_factor = _number("growth_factor", growth_factor)
            backoff_factor = _number("backoff_factor", backoff_factor)
            growth_interval = int(_number("growth_interval", growth_interval))
            self._floor = min(self._floor, init_scale)
        # That of torch.cuda.amp warns that its name is old, and both switch off where CUDA is missing.
        super(TorchGradScaler, self).__init__(
            "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

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
        _, use = self._use(optimizer, "unscale_")
        if use["stage"] is OptState.UNSCALED:
            raise StateError("unscale_() has already been called on this optimizer since the last update().")
        if use["stage"] is OptState.STEPPED:
            raise StateError("unscale_() is being called after step().")
        inverse, found = self._steps.inverse_of(self._scale), torch.zeros_like(self._scale)  # type: ignore[arg-type]
        # One line, here and below: an interrupt comes before all of it or after.
        use.update(stage=OptState.UNSCALED, found_inf_per_device=self._unscale_grads_(optimizer, inverse, found, False))

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
        drop_casts()  # the weights change, and a region around the loop keeps casts of them
        if not self._enabled:
            if ranks.is_running() and self._published is None:
                self._published = ScalerSettings()
                params = [p for group in optimizer.param_groups for p in group["params"]]
                self._published.publish_disabled(self.process_group, params)
            return optimizer.step(*args, **kwargs)
        steps, use = self._use(optimizer, "step")
        if use["stage"] is OptState.STEPPED:
            raise StateError("step() has already been called since the last update().")
        if (args or kwargs) and any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError("Closure use is not currently supported if GradScaler is enabled.")
        if why := self._steps.backend.optimizer_refusal(optimizer, casts=False):
            raise StateError(f"GradScaler.step(optimizer): {type(optimizer).__name__} {why}")
        if takes_grad_scaler(optimizer):
            return self._step_on_device(optimizer, steps, use, None, *args, **kwargs)
        by_itself, scale = honours_found_inf(optimizer) and not is_torchs(type(optimizer)), None
        if by_itself and use["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            scale = self._scale
        elif use["stage"] is OptState.READY:
            own = type(self)._check_inf_per_device is not GradScaler._check_inf_per_device  # it counts too
            earlier = self._check_inf_per_device(optimizer) if own and steps.fused.skips_on_device else {}
            self.unscale_(optimizer)
            use["found_inf_per_device"].update({str(each): flag for each, flag in earlier.items()})
        found = use["found_inf_per_device"]
        if not found and (not honours_found_inf(optimizer) or any(p.grad is not None for p in steps.params)):
            raise NothingChecked(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient: run "
                "scaler.scale(loss).backward() on a loss that depends on them first."
            )
        if not found or by_itself or steps.device_decides(optimizer):
            return self._step_on_device(optimizer, steps, use, scale, *args, **kwargs)
        result = self._maybe_opt_step(optimizer, use, *args, **kwargs)
        if use["stage"] is not OptState.STEPPED:  # a method of a subclass has stepped or skipped, by the same flags
            use["stage"] = OptState.STEPPED
            steps.last = self._combined(found.values())
            self._steps.judge(steps, [(None, (steps.last.item(), self._scale))], self._rules())
        return result

    def _step_on_device(
        self, optimizer: Any, steps: OptimizerSteps, use: dict[str, Any], scale: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Lend the optimizer the flag by which it skips, and the scale that its gradients have; or, older, the scaler.

        A step without any gradient is not recorded.
        """
        run, found = bound_step(optimizer.step), use["found_inf_per_device"]
        with _lent(optimizer, scale, self._combined(found.values()) if found else None):
            given = {"grad_scaler": self} if takes_grad_scaler(optimizer) else {}
            result, use["stage"] = run(*args, **kwargs, **given), OptState.STEPPED
        found = use["found_inf_per_device"]  # the older protocol unscales in the step
        steps.last = flag = self._combined(found.values()) if found else None
        if flag is not None:
            self._steps.record(steps, flag, self._scale, self._rules())
        return result

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
        scale, tracker = self._check_scale_growth_tracker("update")
        uses: Any = self._per_optimizer_states
        if new_scale is not None:
            is_tensor = isinstance(new_scale, torch.Tensor)
            if is_tensor and (new_scale.numel() != 1 or new_scale.requires_grad):  # type: ignore[union-attr]
                what = "a number or a tensor of one element that needs no gradient"
                raise PolicyError(f"GradScaler.update(new_scale): must be {what}.")
            given = new_scale.item() if is_tensor else new_scale  # type: ignore[union-attr]
            number = _number("new_scale", given, method="update")
            self._floor = min(self._floor, number)
            self._set(number)
        else:
            flags = [flag for use in uses.values() for flag in use["found_inf_per_device"].values()]
            if not flags:
                raise NothingChecked("No inf checks were recorded prior to update. Call scaler.step(optimizer) first.")
            self._steps.move(scale, tracker, self._combined(flags), self._rules())
        fresh: Any = defaultdict(uses.default_factory)
        self._per_optimizer_states, self._steps.moves_from, self._steps.began = fresh, None, False

    @property
    def last_step(self) -> Any:
        """Outcome of the last ``step``, as :attr:`xamp.sessions.session.Session.last_step`. May wait for the device."""
        found = {steps.optimizer(): steps.outcome() for steps in self._all_steps()}
        return next(iter(found.values()), None) if len(found) <= 1 else found

    @property
    def stats(self) -> Stats:
        """Counts of steps, as :attr:`xamp.sessions.session.Session.stats`, without replays. Waits for the device."""
        return Stats() if self._steps is None else self._steps.all_counted()

    @eager_by_rule
    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return Python numbers for a logger, as :meth:`xamp.sessions.session.Session.metrics` does.

        Where the device decides on steps and is not waited for (``wait``), the scale and the last outcome are, like the
        norm, those of an earlier call, and the counts lack the ``steps_late`` newest steps, at most 16 of each
        optimizer.
        """
        alive = self._all_steps()
        if self._steps is None or self._scale is None:
            return metrics.numbers([self.get_scale()], Stats(), 0, math.nan, 0)
        stages = [self._per_optimizer_states[id(each.optimizer())]["stage"] for each in alive]
        scaled = self._steps.began and OptState.READY in stages
        known = metrics.norm_over(each.optimizer() for each in alive)
        params = [param for each in alive for param in each.params]
        return metrics.numbers(
            [metrics.late_number(self._steps, "scale", self._scale, wait)],
            self.stats if wait else self._steps.stats,
            int(metrics.late_number(self._steps, "skipped", sum(each.skipped() for each in alive), wait)),
            metrics.norm_of(self._steps, "norm", known, params, wait=wait, busy=scaled),
            0 if wait else sum(each.history.waiting for each in alive),
        )

    def _all_steps(self) -> list[OptimizerSteps]:
        """Return the steps of the optimizers that are alive."""
        return [] if self._steps is None else list(self._steps.by_optimizer.values())

    def get_scale(self) -> float:
        """Return the scale; 1.0 where disabled. Waits for the device."""
        return self._rules().within(self._init_scale) if self._enabled and self._scale is None else super().get_scale()

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
        super().set_growth_factor(_number("growth_factor", new_factor, low=0, method="set_growth_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor to ``new_factor``."""
        super().set_backoff_factor(_number("backoff_factor", new_factor, None, LARGEST_SCALE, "set_backoff_factor"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval to ``new_interval``, a number of clean updates."""
        super().set_growth_interval(int(_number("growth_interval", new_interval, method="set_growth_interval")))

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
            why = "possibly because it was saved from a disabled instance of GradScaler."
            raise EmptyState(f"{call}: The source state dict is empty, {why}")
        scales: list[Any] = formats.read(call, state_dict)["scalers"]
        if len(scales) != 1:
            raise CheckpointError(f"{call}: it holds {len(scales)} loss scales, and a GradScaler has one.")
        saved: formats.ReadScaler = scales[0]
        growth, backoff, interval = self._growth_factor, self._backoff_factor, self._growth_interval
        if saved["dynamic"] is False:
            growth = backoff = 1.0
        elif "factors" in saved:
            growth, backoff, interval = saved["factors"]
        scale = max(saved["scale"], SMALLEST_SCALE)  # the inverse of a collapsed run's scale may be inf
        # The scale grows where the tracker equals the interval. With a larger tracker it would never grow again.
        tracker = max(min(saved["growth_tracker"], interval - 1), 0)
        numbers = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
        super().load_state_dict({"scale": scale, **numbers, "_growth_tracker": tracker})
        self._floor = min(self._floor, scale)
        if self._scale is not None:
            self._set(scale)

    def __getstate__(self) -> dict[str, Any]:
        uses: Any = self._per_optimizer_states if self._enabled else defaultdict(None)
        if any(use["stage"] is not OptState.READY for use in uses.values()):
            raise NothingChecked(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        state = {**self.__dict__, "_per_optimizer_states": defaultdict(uses.default_factory)}
        for name in ("process_group", "_published", "_steps", "_scale", "_growth_tracker"):  # of this process
            state.pop(name, None)
        state.update(_init_scale=self.get_scale(), _init_growth_tracker=self._get_growth_tracker())
        return state

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make scale and growth tracker on ``dev``."""
        if self._growth_tracker is not None:
            raise NothingChecked("GradScaler: _scale and _growth_tracker are there already.")
        if self._scale is not None:  # somebody has set it
            self._init_scale = float(self._scale)
        self._steps = ScalerSteps(torch.device(dev))
        super()._lazy_init_scale_growth_tracker(dev)
        self._set(self._init_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return super()._check_scale_growth_tracker(funcname)
        except AssertionError as error:
            raise NothingChecked(str(error)) from None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale and check by the backend, and let the ranks that decide together share what was found.

        Gradients that an error leaves half unscaled are dropped.
        """
        known: ScalerSteps = self._steps
        steps, _ = self._use(optimizer, "unscale_")
        steps.read_groups(optimizer)
        grads = [grad for param in steps.params for grad in (param.grad,) if grad is not None]
        kinds = {(type(grad), grad.device, grad.layout, grad.dtype) for grad in grads}
        if not allow_fp16 and any(dtype is torch.float16 for *_, dtype in kinds):
            raise PolicyError(
                "Attempting to unscale FP16 gradients. GradScaler wants fp32 parameters: leave the model in fp32 and "
                "use autocast, or let xamp.initialize(model, optimizer, level='O2') keep fp32 masters of an fp16 one."
            )
        if (running := ranks.is_running()) and not known.ranks.is_compared:
            settings = {"enabled": True, "loss_scale": self._init_scale, **self._rules()._asdict()}
            known.ranks.compare(self.process_group, steps.params, settings)
        try:
            usual = (torch.Tensor, found_inf.device, torch.strided)
            if len(kinds) == 1 and kinds == {(*usual, grads[0].dtype)} and not grads[0].is_complex():
                known.backend.unscale_(grads, found_inf, inv_scale)
            else:
                unscale.coalesce_half(steps.params)
                grads = [grad for param in steps.params for grad in (param.grad,) if grad is not None]
                unscale.unscale_by_group_(grads, found_inf, inv_scale, known.backend.unscale_)
            if running:
                known.ranks.share(found_inf, self.process_group, steps.params, known.saturates)
            return {found_inf.device: found_inf} if grads or any(map(ranks.is_shard, steps.params)) else {}
        except BaseException:
            for param in steps.params:  # nobody can tell which of them are unscaled
                param.grad = None
            raise

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Step, or skip the step by the flags of the optimizer, and count it."""
        known: ScalerSteps = self._steps
        steps: OptimizerSteps = optimizer_state["steps"]
        result = None
        if known.is_captured():
            name = type(optimizer).__name__
            why = host_step_refusal(name, steps.fused.skips_on_device, known.backend, known.device)
            raise StateError(f"GradScaler.step(optimizer): {why}")
        use = optimizer_state
        skipped = self._combined(use["found_inf_per_device"].values()).item() != 0
        counted = known.stats.plus(skipped=skipped)
        if skipped:
            use["stage"], known.stats = OptState.STEPPED, counted
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler reads it, and else warns
        else:
            run, first = bound_step(optimizer.step), steps.newest
            for first in steps.params:
                if first.grad is not None:
                    break
            before, given = first._version, contextlib.nullcontext()  # type: Any, Any
            if steps.fused.skips_on_device:  # who overrides its step, or hooks it, may look at them
                given = _lent(optimizer, None, self._combined(use["found_inf_per_device"].values()))
            try:
                with given:
                    result, use["stage"], known.stats = run(*args, **kwargs), OptState.STEPPED, counted
            except BaseException:
                if first._version != before:  # it has stepped, and what interrupted it came after
                    use["stage"], known.stats = OptState.STEPPED, counted
                raise
        steps.last = StepOutcome.SKIPPED if skipped else StepOutcome.APPLIED
        if skipped or steps.run or steps.history.waiting:
            known.judge(steps, steps.history.drain(), self._rules())
            known.judge(steps, [(None, (skipped, self._scale))], self._rules(), counts=False)
        return result

    def _multiply(self, outputs: Any) -> Any:
        """Do the work of :meth:`scale`. It calls itself for nested outputs, because a subclass may override it."""
        if isinstance(outputs, torch.Tensor):
            if self._steps is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            if not self._steps.began:
                self._steps.backend.clear_overflow(self._steps.device)
                self._steps.began = True
            factor: Any = self._scale
            return outputs * factor.to(outputs.device, non_blocking=True)
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes)):
            raise PolicyError(
                f"GradScaler.scale(outputs): must be a tensor or an iterable of tensors, and there is a "
                f"{type(outputs).__name__}."
            )
        scaled = map(self._multiply, outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _use(self, optimizer: Optimizer, call: str) -> tuple[OptimizerSteps, dict[str, Any]]:
        """Return the steps of ``optimizer``, and what torch keeps of it since the last ``update``."""
        self._check_scale_growth_tracker(call)
        use = self._per_optimizer_states[id(optimizer)]
        steps: OptimizerSteps | None = use.get("steps")
        if steps is not None and steps.optimizer() is optimizer and state_of(optimizer) is None:
            return steps, use
        new = self._steps.of(optimizer, call)
        if steps not in (None, new):  # another had this id and is gone; its flag counts all the same
            self._per_optimizer_states[-len(self._per_optimizer_states)] = self._per_optimizer_states.pop(id(optimizer))
            use = self._per_optimizer_states[id(optimizer)]
        use["steps"] = new
        return new, use

    def _combined(self, flags: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return a flag that is raised where one of ``flags`` is, on the device of the scale."""
        found, device = list(flags), self._scale.device  # type: ignore[union-attr]
        if len(found) == 1 and found[0].device == device:
            return found[0]
        return functools.reduce(torch.maximum, [flag.to(device, non_blocking=True) for flag in found])

    def _set(self, scale: float) -> None:
        """Set the scale on the device, within its bounds."""
        rules = self._rules()
        self._init_scale = rules.within(scale)
        self._steps.set(self._scale, self._init_scale, rules)
        metrics.forget_number(self._steps, "scale")

    def _rules(self) -> ScaleRules:
        floor, ceiling = self._floor, max(self._ceiling, self._floor)
        return ScaleRules(True, self._growth_factor, self._backoff_factor, self._growth_interval, floor, ceiling)


@contextlib.contextmanager
def _lent(optimizer: Any, scale: Any, flag: Any) -> Iterator[None]:
    """Lend ``optimizer`` the scale that its gradients still have, and the flag by which it skips."""
    given = getattr(optimizer, "grad_scale", None)  # of the user's own; it counts too
    optimizer.grad_scale = given if scale is None else scale * (1 if given is None else given)
    optimizer.found_inf = flag
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _number(name: str, value: object, low: float | None = None, high: float | None = None, method: str = "") -> float:
    """Return ``value`` as a number in bounds. None: fp32's bound where it is a scale, else that of ``initialize``.

    ``method``: that which the user called, with an argument ``new_...``; by default the constructor.
    """
    least, most, whole = (SMALLEST_SCALE, LARGEST_SCALE, False) if name.endswith("_scale") else SCALER_RANGES[name]
    low, high = least if low is None else low, most if high is None else high
    call, argument = (f"GradScaler.{method}", f"new_{name.rpartition('_')[2]}") if method else ("GradScaler", name)
    try:
        return number_between(argument, value, low, high, whole=whole, call=call)
    except PolicyError as error:
        raise BadNumber(str(error)) from None
