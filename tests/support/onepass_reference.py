"""What :mod:`xamp.onepass` does, in torch's operators and fp64: a step by SGD, Adam and AdamW, tensor by tensor.

It has the interface of the kernels, and shares no code with them. ``use`` puts it in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from xamp import onepass
from xamp.plans import available

Grads = Sequence["torch.Tensor | None"]

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


class Plan:
    """See :class:`xamp.onepass.Plan`.

    Attributes:
        calls: the calls of all plans so far, by name.
    """

    calls: list[str] = []

    def __init__(self, rule: onepass.Rule, rows: Sequence[onepass.Row], tables: Any = None, *, block: int = 0) -> None:
        self.tables = tables
        for row in rows:
            for tensor in (row.param, row.low, *row.states):
                if tensor is None:
                    continue
                if not _is_like(tensor, row.param):
                    raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has another order in memory")
        self.rule = rule
        self.rows = list(rows)
        self.tensors = [tensor for row in rows for tensor in row.tensors]
        self._places = [_places(row) for row in rows]
        self._checked: list[torch.Tensor] = []

    def moved(self) -> bool:
        return [_places(row) for row in self.rows] != self._places

    def suits(self, grads: Grads, *, of_params: bool = False) -> bool:
        pairs = zip(self.rows, grads, strict=True)
        return all(g is None or (_is_like(g, row.param) and g.layout is torch.strided) for row, g in pairs)

    def check(
        self,
        grads: Grads,
        found_inf: torch.Tensor,
        hyper: Sequence[Mapping[str, Any]] | None = None,
        inv_scale: torch.Tensor | None = None,
    ) -> None:
        Plan.calls.append("check")
        held = [grad for grad in grads if grad is not None]
        if any(not bool(grad.isfinite().all()) for grad in held):
            found_inf.fill_(1.0)
        self._checked = [grad.double().square().sum() for grad in held]
        if inv_scale is not None:
            self._multiply(grads, inv_scale)

    def checked_norm(self, inv_scale: torch.Tensor | None = None) -> torch.Tensor:
        Plan.calls.append("checked_norm")
        total = torch.stack(self._checked).sum().sqrt() * (1.0 if inv_scale is None else inv_scale.double())
        return total.float()

    def norm(
        self,
        grads: Grads,
        inv_scale: torch.Tensor | None = None,
        kind: float = 2.0,
        clip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        Plan.calls.append("norm")
        pairs = [(row, grad) for row, grad in zip(self.rows, grads, strict=True) if grad is not None]
        flat = torch.cat([self._read(row, grad, inv_scale, clip).flatten() for row, grad in pairs])
        found: torch.Tensor = torch.linalg.vector_norm(flat, kind)
        return found.float()

    def clip_factor(self, grads: Grads, norm: torch.Tensor, limit: float, eps: float = 1e-6) -> torch.Tensor:
        factor = torch.clamp(limit / (norm + eps), max=1.0)
        self._multiply(grads, factor)
        return factor

    def _multiply(self, grads: Grads, factor: torch.Tensor) -> None:
        for row, grad in zip(self.rows, grads, strict=True):
            if row.in_place and grad is not None:
                grad.data.mul_(factor)

    @staticmethod
    def _read(row: onepass.Row, grad: torch.Tensor, *factors: torch.Tensor | None) -> torch.Tensor:
        wide = grad.double()
        for factor in factors:
            wide = wide if factor is None or row.in_place else wide * factor.double()
        return wide

    @torch.no_grad()
    def step(
        self,
        grads: Grads,
        hyper: Sequence[Mapping[str, Any]],
        found_inf: torch.Tensor | None = None,
        inv_scale: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
    ) -> None:
        Plan.calls.append("step")
        if found_inf is not None and bool(found_inf):
            return
        rule = {"sgd": self._sgd, "adam": self._adam}[self.rule.name]
        for row, grad in zip(self.rows, grads, strict=True):
            if grad is None:
                continue
            wide = self._read(row, grad, inv_scale, clip)
            group = hyper[row.group]
            new = rule(row, -wide if group.get("maximize") else wide, group)
            # Through .data: kernels leave the versions as they are.
            row.param.data.copy_(new)
            if row.low is not None:
                row.low.data.copy_(row.param.data)

    def _sgd(self, row: onepass.Row, grad: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        lr, momentum, param = float(group["lr"]), group["momentum"], row.param.double()
        grad = grad + group["weight_decay"] * param
        if momentum:
            buffer = row.states[0]
            first = bool(group.get("first")) or (row.step is not None and not bool(row.step))
            now = grad if first else momentum * buffer.double() + (1 - group["dampening"]) * grad
            grad = grad + momentum * now if group["nesterov"] else now
            buffer.data.copy_(now)
        if row.step is not None:
            row.step.data.add_(1)
        return param - lr * grad

    def _adam(self, row: onepass.Row, grad: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        assert row.step is not None
        lr, (beta1, beta2), decay, param = float(group["lr"]), group["betas"], group["weight_decay"], row.param.double()
        row.step.data.add_(1)
        count = float(row.step)
        if self.rule.decoupled:
            param = param * (1 - lr * decay)
        else:
            grad = grad + decay * param
        first, second = row.states[0].double() * beta1 + (1 - beta1) * grad, row.states[1].double() * beta2
        second = second + (1 - beta2) * grad.square()
        row.states[0].data.copy_(first)
        row.states[1].data.copy_(second)
        if group["amsgrad"]:
            second = torch.maximum(row.states[2].double(), second)
            row.states[2].data.copy_(second)
        size = (second / (1 - beta2**count)).sqrt() + group["eps"]
        new: torch.Tensor = param - lr / (1 - beta1**count) * first / size
        return new


def _is_like(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    same = tensor.shape == param.shape and tensor.stride() == param.stride() and tensor.device == param.device
    return same and tensor.dtype in _TAKEN


def _places(row: onepass.Row) -> list[int]:
    return [t.data_ptr() for t in (row.param, row.low, *row.states, row.step) if t is not None]


def takes(tensor: torch.Tensor) -> bool:
    """See :func:`xamp.onepass.takes`: here contiguous tensors only."""
    return tensor.layout is torch.strided and tensor.dtype in _TAKEN and tensor.is_contiguous()


def use(patched: pytest.MonkeyPatch) -> type[Plan]:
    """Put the reference in the place of the kernels, on any device."""
    patched.setattr(available, "plan", Plan)
    patched.setattr(onepass, "takes", takes)
    patched.setattr(available, "refusal", lambda device: "")
    Plan.calls = []
    return Plan
