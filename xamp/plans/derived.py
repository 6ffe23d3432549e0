"""Steps in one pass of optimizers that are torch's SGD, Adam or AdamW under another name, or in another notation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp import onepass
from xamp.plans import layouts, lists
from xamp.torch_compat.closures import loss_of

__all__ = ["StepsInOnePass", "step_as_adamw"]

_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad")


class StepsInOnePass(Optimizer):
    """A base, before the class of torch's: ``step`` takes the kernels where they run, and torch's own step elsewhere.

    Torch makes the states, so the first step of a parameter is its own.

    Attributes:
        torchs: the class of torch's.
    """

    torchs: type[Optimizer]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        if not self._step_in_one_pass():
            own: Any = super().step
            if getattr(own, "hooked", False):  # torch's wrapper would run the hooks, which are run around this step
                own.__wrapped__(self)
            else:
                own()
        return loss

    def _step_in_one_pass(self) -> bool:
        """Step; return False, and change nothing, where the kernels or the states do not allow it."""
        lent = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not params or not lists.may_run(params[0].device) or lists.is_capturing(params[0].device):
            return False
        if layouts.refusal(self.torchs, self) or any(value is not None for value in lent):
            return False
        parts = list(self._parts())
        runs = [None if part is None else lists.prepared(*part) for part in parts]
        if None in runs:
            return False
        for run in runs:
            run()  # type: ignore[misc]
        for state in (self.state[param] for param in params if "step" in self.state.get(param, {})):
            state["step"] += 1
        return True

    def _parts(self) -> Iterator[tuple[Any, ...] | None]:
        """Yield what :func:`xamp.plans.lists.prepared` takes, for parameters with one count; None: they step else."""
        layout = layouts.LAYOUTS[self.torchs]
        for group in self.param_groups:
            if group.get("fused") or group.get("capturable"):
                yield None
                return
            numbers = {name: group[name] for name in _NUMBERS if name in group}
            if "betas" in group:
                numbers["beta1"], numbers["beta2"] = group["betas"]
            parts: dict[float, list[torch.Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    parts.setdefault(float(self.state.get(param, {}).get("step", 0.0)), []).append(param)
            for count, params in parts.items():
                states = [[self.state.get(param, {}).get(key) for param in params] for key in layout.keys(group)]
                given: list[list[Any]] = [[param.grad for param in params], params, *states]
                yield (layout.rule(group), given, numbers, (count + 1.0, True)) if _are_fp32(given) else None


def step_as_adamw(
    state: Mapping[torch.Tensor, dict[str, Any]],
    params: Sequence[torch.Tensor],
    numbers: Mapping[str, Any],
    divisor: torch.Tensor | None,
) -> bool:
    """Step by AdamW without a correction of the bias; return False, and change nothing, where the kernels cannot.

    Args:
        state: of each parameter a count of steps, the same for all, and the moments. Without them the kernels cannot.
        params: parameters with gradients, fp32.
        numbers: see :func:`xamp.plans.lists.step`.
        divisor: the gradients are divided by it first.
    """
    found = [state.get(param, {}) for param in params]
    if not params or not lists.may_run(params[0].device) or len({one.get("step") for one in found}) > 1:
        return False
    moments = [[one.get(name) for one in found] for name in ("exp_avg", "exp_avg_sq")]
    given: list[list[Any]] = [[param.grad for param in params], list(params), *moments]
    if not _are_fp32(given) or not lists.step(
        onepass.Rule("adam", decoupled=True), given, numbers, (1, False), divisor=divisor
    ):
        return False
    for one in found:
        one["step"] += 1
    return True


def _are_fp32(rows: Sequence[Sequence[Any]]) -> bool:
    return all(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for row in rows for t in row)
