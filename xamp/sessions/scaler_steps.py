"""The state of a :class:`xamp.GradScaler` besides torch's numbers: the device's backend, and what each optimizer did.

A step that the device decides is counted and judged when its flag has arrived. Optimizers are held weakly.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.distributed.rank_settings import ScalerSettings
from xamp.errors import LossScaleCollapsed, PolicyError, StateError
from xamp.registry import registry
from xamp.scaling import unscale
from xamp.scaling.counts import COLLAPSE_RUN, History, Stats, StepOutcome, collapse_message
from xamp.scaling.fused import FusedChoice
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import ScaleRules
from xamp.sessions.session import find_session
from xamp.torch_compat import kernels
from xamp.values.log import say

__all__ = ["OptimizerSteps", "ScalerSteps"]


class OptimizerSteps:
    """The steps of one optimizer.

    Attributes:
        optimizer: the optimizer, held weakly.
        params: the parameters in its groups.
        fused: tells whether its fused implementation skips rightly on the device.
        last: what the last step did: an outcome, or the flag on the device that tells it; None before the first.
        run: overflows in a row that no smaller scale could cure.
        newest: flag and scale of the newest step that the device decided.
        history: those of the steps before it.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, names: Sequence[str]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.params: list[torch.Tensor] = []
        self.fused = FusedChoice(optimizer, False, names, sparse=False)
        self.last: StepOutcome | torch.Tensor | None = None
        self.run = 0
        self.newest = torch.zeros(2, device=device)
        self.history = History(self.newest)
        self._stateless = False

    def read_groups(self, optimizer: Optimizer) -> None:
        """Remember the parameters that the groups hold now."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len(params) == len(self.params) > 0 and all(map(operator.is_, params, self.params)):
            return
        self.params = params
        self._stateless = all(group.get("momentum") == 0 for group in optimizer.param_groups)
        self.fused.refresh(optimizer)

    def device_decides(self, optimizer: Any) -> bool:
        """Return whether the optimizer skips rightly on the device, and has state for each parameter.

        Torch's fused SGD makes momentum buffers of uninitialised memory on a step that it skips.
        """
        if not self.fused.skips_on_device or self._stateless:
            return self.fused.skips_on_device
        state = getattr(optimizer, "state", {})
        return len(state) == len(self.params) or all(param.grad is None or param in state for param in self.params)

    def skipped(self) -> torch.Tensor | bool:
        """Return whether the last step was skipped, which the device may know only."""
        return self.last if isinstance(self.last, torch.Tensor) else self.last is StepOutcome.SKIPPED

    def outcome(self) -> StepOutcome | None:
        """Return the outcome of the last step. May wait for the device."""
        return None if self.last is None else StepOutcome.SKIPPED if self.skipped() else StepOutcome.APPLIED


class ScalerSteps:
    """The device of one scaler, and the steps of its optimizers.

    Attributes:
        device, backend: those of the scale.
        fused: the names of the optimizers whose fused implementation is right on the device.
        saturates: the device returns its largest number for an inf, and tells of an overflow by a flag.
        stats: counts of steps, as far as the host knows of them; replays of a graph are not among them.
        began: a loss was scaled since the last update.
        ranks: the scalers of other ranks.
        by_optimizer: the steps of each optimizer that is alive.
        moves_from: the version of the scale before an update that is not finished; None: there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = registry.resolve("auto", device.type)
        can = self.backend.capabilities(device)  # read here, for it may wait for trials: no step does
        self.fused, self.saturates = can.fused_optimizers, can.overflow == "flag"
        self.stats = Stats()
        self.began = False
        self.moves_from: int | None = None
        self._capturing = self.backend.capture_check(device)
        self._power_of_two = -1  # version of the scale at which it is known as one
        self.ranks = ScalerSettings()
        self.by_optimizer: Any = WeakIdKeyDictionary()

    def of(self, optimizer: Optimizer, call: str) -> OptimizerSteps:
        """Return the steps of ``optimizer``.

        Raises:
            StateError: ``initialize`` manages the optimizer.
            PolicyError: it is not an optimizer.
        """
        try:
            found: OptimizerSteps | None = self.by_optimizer.get(optimizer)
            iter(optimizer.param_groups)
        except (AttributeError, TypeError) as error:
            raise PolicyError(
                f"GradScaler.{call}({type(optimizer).__name__}): must be given an optimizer, or what has its "
                f"param_groups and step and can be referred to weakly: {error}."
            ) from None
        if found is None or state_of(optimizer) is not None:
            self._refuse_managed(optimizer, call)
        if found is None:
            found = self.by_optimizer[optimizer] = OptimizerSteps(optimizer, self.device, self.fused)
        return found

    def _refuse_managed(self, optimizer: Optimizer, call: str) -> None:
        found = find_session(optimizer)
        if found is not None and found.engine.enabled:
            raise StateError(
                f"GradScaler.{call}({type(optimizer).__name__}): xamp.initialize manages this optimizer and scales "
                "its losses already. Use `with xamp.scale_loss(loss, optimizer)`, or close the session first: "
                "xamp.session(optimizer).close()."
            )

    def set(self, scale: torch.Tensor, number: float, rules: ScaleRules) -> None:
        """Set the scale."""
        scale.fill_(number)
        self._power_of_two = scale._version if math.frexp(number)[0] == 0.5 and rules.keeps_powers_of_two else -1

    def move(self, scale: torch.Tensor, tracker: torch.Tensor, flag: torch.Tensor, rules: ScaleRules) -> None:
        """Back off or grow the scale within its bounds; once, where a call that was interrupted is made again."""
        version = scale._version
        stays = self._power_of_two == version and rules.keeps_powers_of_two
        if self.moves_from is None:
            self.moves_from = version
        if self.moves_from == version:
            factors = rules.growth_factor, rules.backoff_factor
            kernels.update_scale_(scale, tracker, flag, *factors, rules.growth_interval)
        # On a CPU it costs less to ask. A graph is replayed at other scales.
        if not scale.is_cpu or self.is_captured() or not rules.floor <= scale.item() <= rules.ceiling:
            scale.clamp_(rules.floor, rules.ceiling)
        self._power_of_two = scale._version if stays else -1

    def inverse_of(self, scale: torch.Tensor) -> torch.Tensor:
        """Return 1/scale, which says of itself whether the host knows it as a power of two. No graph may rely on it."""
        inverse = scale.reciprocal()  # in fp32: not every device has fp64
        kernels.set_power_of_two(inverse, self._power_of_two == scale._version and not self.is_captured())
        return inverse

    def is_captured(self) -> bool:
        """Return whether a graph is being captured."""
        return self._capturing is not None and self._capturing()

    def record(self, steps: OptimizerSteps, flag: torch.Tensor, scale: Any, rules: ScaleRules) -> None:
        """Record a step that the device decided. Replays of a captured one are not recorded."""
        if not self.is_captured():
            torch.stack((flag, scale), out=steps.newest)
            self.judge(steps, steps.history.push(None), rules)

    def judge(
        self, steps: OptimizerSteps, records: Iterable[tuple[Any, Any]], rules: ScaleRules, *, counts: bool = True
    ) -> None:
        """Judge steps, of which ``records`` has flag and scale; log those that were skipped. ``counts``: count them."""
        for _, (flag, scale) in records:
            if counts:
                self.stats = self.stats.plus(skipped=bool(flag))
            cures = flag and rules.falls and scale > rules.floor  # a smaller scale may
            steps.run = 0 if cures or not flag else steps.run + 1
            if flag:
                say("gradient overflow: step skipped, loss scale %s", f"{rules.after_overflow(float(scale)):g}")
            if steps.run and steps.run % COLLAPSE_RUN == 0:
                held = [param for param in steps.params if param.grad is not None]
                bad = [p for p in held if not bool(unscale.values(ranks.local(p.grad)).isfinite().all())]
                names = [f"a parameter of shape {tuple(param.shape)}" for param in bad]
                message = collapse_message(f"{float(scale):g}", rules, names, len(held), not self.saturates)
                raise LossScaleCollapsed(message)

    def all_counted(self) -> Stats:
        """Return the counts of all steps. Waits for the device."""
        flags = [flag != 0 for steps in self.by_optimizer.values() for _, (flag, _) in steps.history.peek()]
        return Stats(self.stats.applied + len(flags) - sum(flags), self.stats.skipped + sum(flags))
