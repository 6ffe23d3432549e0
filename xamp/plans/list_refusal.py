"""Whether an optimizer's step on lists of tensors fails, because some of them are DTensors."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from xamp.distributed.ranks import is_dtensor
from xamp.ground.torch_private.modules import default_to_fused_or_foreach

__all__ = ["list_refusal"]


def list_refusal(optimizer: Optimizer) -> str:
    """Return why the optimizer's step on lists of tensors would fail: not all are DTensors; empty if it would not.

    torch steps lists by itself on most devices, and on a CPU where it is told to.
    """
    for group in optimizer.param_groups:
        count = sum(map(is_dtensor, group["params"]))
        if 0 < count < len(group["params"]) and _steps_lists(group):
            return (
                f"steps lists of parameters, and {count} of {len(group['params'])} in one group are DTensors, which "
                "torch's operators on lists refuse beside plain tensors. Make it with foreach=False, and not fused."
            )
    return ""


def _steps_lists(group: dict[str, Any]) -> bool:
    if group.get("fused") or group.get("foreach") is not None or "foreach" not in group:
        return bool(group.get("fused") or group.get("foreach"))
    return bool(default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])
