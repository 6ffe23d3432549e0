"""What a device is asked, to learn its gaps: a call of each operator that a step makes outside of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["DTYPES", "OPERATORS", "WAITING"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Those of gradients, in which each operator is asked."""

Call = Callable[[torch.Tensor], Any]


def _one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=tensor.device)


def _unscale(grad: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([grad], _one(grad).reshape(1), _one(grad))


def _update_scale(grad: torch.Tensor) -> None:
    tracker = torch.zeros((), dtype=torch.int32, device=grad.device)
    torch._amp_update_scale_(_one(grad), tracker, _one(grad).reshape(1), 2.0, 0.5, 2000)


def _fused_sgd(grad: torch.Tensor) -> None:
    torch._fused_sgd_(
        [grad],
        [grad.clone()],
        [grad.clone()],
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _fused_adam(op: Any) -> Call:
    def call(grad: torch.Tensor) -> None:
        lists = [[grad], *([grad.clone()] for _ in range(3)), [], [_one(grad)]]
        op(*lists, lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)

    return call


def _fused_adagrad(grad: torch.Tensor) -> None:
    lists = [[grad], [grad.clone()], [grad.clone()], [_one(grad)]]
    torch._fused_adagrad_(*lists, lr=0.1, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False)


OPERATORS: Mapping[str, Call] = {
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "aten::_amp_update_scale_": _update_scale,
    "aten::_foreach_copy_": lambda grad: torch._foreach_copy_([grad], [grad.float()]),
    "aten::_foreach_lerp_.Scalar": lambda grad: torch._foreach_lerp_([grad], [grad.clone()], 0.5),
    "aten::_foreach_mul_.Scalar": lambda grad: torch._foreach_mul_([grad], 0.5),
    "aten::_foreach_mul_.Tensor": lambda grad: torch._foreach_mul_([grad], _one(grad)),
    "aten::_foreach_norm.Scalar": lambda grad: torch._foreach_norm([grad], float("inf")),
    "aten::_fused_adagrad_": _fused_adagrad,
    "aten::_fused_adam_": _fused_adam(torch._fused_adam_),
    "aten::_fused_adamw_": _fused_adam(torch._fused_adamw_),
    "aten::_fused_sgd_": _fused_sgd,
    "aten::add_.Tensor": lambda grad: grad.add_(grad.clone()),
    "aten::all": lambda grad: grad.isfinite().all(),
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
