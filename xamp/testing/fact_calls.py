"""What a device is asked, to learn its gaps: a call of each operator that a step makes outside of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xamp.torch_compat.torch_private import operators

__all__ = ["DTYPES", "OPERATORS", "STEPS", "WAITING", "Call", "Step"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Those of gradients, in which each operator is asked."""

Number = Callable[[float], float]
Call = Callable[[torch.Tensor], Any]
Step = Callable[..., None]


def _one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=tensor.device)


def _unscale(grad: torch.Tensor) -> None:
    operators.amp_foreach_non_finite_check_and_unscale_([grad], _one(grad).reshape(1), _one(grad))


def _update_scale(grad: torch.Tensor) -> None:
    tracker = torch.zeros((), dtype=torch.int32, device=grad.device)
    operators.amp_update_scale_(_one(grad), tracker, _one(grad).reshape(1), 2.0, 0.5, 2000)


def _sgd(grad: torch.Tensor, number: Number) -> None:
    lists: Any = [[grad], [grad.clone()], [grad.clone()]]
    numbers: Any = {"weight_decay": number(0.01), "momentum": number(0.9), "lr": number(0.1), "dampening": number(0.1)}
    operators.fused_sgd_(*lists, **numbers, nesterov=False, maximize=False, is_first_step=False)


def _adam(op: Any, grad: torch.Tensor, number: Number) -> None:
    lists = [[grad], *([grad.clone()] for _ in range(3)), [], [_one(grad)]]
    numbers = {"lr": number(0.1), "beta1": number(0.9), "beta2": number(0.999), "weight_decay": number(0.01)}
    op(*lists, **numbers, eps=number(1e-8), amsgrad=False, maximize=False)


def _adagrad(grad: torch.Tensor, number: Number) -> None:
    lists: Any = [[grad], [grad.clone()], [grad.clone()], [_one(grad)]]
    numbers: Any = {"lr": number(0.1), "lr_decay": number(0.01), "weight_decay": number(0.01), "eps": number(1e-10)}
    operators.fused_adagrad_(*lists, **numbers, maximize=False)


STEPS: Mapping[str, Step] = {
    "aten::_fused_adagrad_": _adagrad,
    "aten::_fused_adam_": functools.partial(_adam, operators.fused_adam_),
    "aten::_fused_adamw_": functools.partial(_adam, operators.fused_adamw_),
    "aten::_fused_sgd_": _sgd,
}
"""Fused steps of a parameter, whose gradient and moments are its own values, with what makes their numbers."""


OPERATORS: Mapping[str, Call] = {
    **{name: functools.partial(step, number=float) for name, step in STEPS.items()},
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "aten::_amp_update_scale_": _update_scale,
    "aten::_foreach_copy_": lambda grad: operators.foreach_copy_([grad], [grad.float()]),
    "aten::_foreach_lerp_.Scalar": lambda grad: operators.foreach_lerp_([grad], [grad.clone()], 0.5),
    "aten::_foreach_mul_.List": lambda grad: operators.foreach_mul_([grad], [grad.clone()]),
    "aten::_foreach_mul_.Scalar": lambda grad: operators.foreach_mul_([grad], 0.5),
    "aten::_foreach_mul_.Tensor": lambda grad: operators.foreach_mul_([grad], _one(grad)),
    "aten::_foreach_norm.Scalar": lambda grad: operators.foreach_norm([grad], float("inf")),
    "aten::add_.Tensor": lambda grad: grad.add_(grad.clone()),
    "aten::copy_": lambda grad: grad.copy_(grad.float()),
    "aten::isfinite": lambda grad: grad.isfinite(),
    "aten::linalg_vector_norm": lambda grad: torch.linalg.vector_norm(grad),
    "aten::maximum.out": lambda grad: torch.maximum(grad, grad.clone(), out=grad.clone()),
    "aten::mul.Tensor": lambda grad: grad * _one(grad),
    "aten::mul_.Tensor": lambda grad: grad.mul_(_one(grad)),
    "aten::ne.Tensor": lambda grad: grad.ne(grad.clone()),
    "aten::reciprocal.out": lambda grad: torch.reciprocal(grad, out=grad.clone()),
    "aten::zero_": lambda grad: grad.zero_(),
}
"""By its name, a call of the operator with a gradient of eight ones."""

WAITING: Mapping[str, Call] = {
    "aten::_local_scalar_dense": lambda tensor: tensor.sum().item(),
    "aten::_unique2": lambda tensor: torch.unique(tensor),
    "aten::equal": lambda tensor: torch.equal(tensor, tensor.clone()),
    "aten::masked_select": lambda tensor: tensor.masked_select(tensor > 0),
    "aten::nonzero": lambda tensor: tensor.nonzero(),
    "aten::repeat_interleave.Tensor": lambda tensor: torch.repeat_interleave(tensor, tensor.long()),
    "aten::unique_consecutive": lambda tensor: torch.unique_consecutive(tensor),
    "aten::unique_dim": lambda tensor: torch.unique(tensor, dim=0),
}
"""Operators at which the host may wait, with a call of each."""
