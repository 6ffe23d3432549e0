"""Operators on lists of tensors: arithmetic, what a loss scaler calls, fused steps of optimizers; lists as one tensor.

Where a module calls one, it looks it up here at each call, ``operators.foreach_mul_``, as it would in torch.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "amp_foreach_non_finite_check_and_unscale_",
    "amp_update_scale_",
    "flatten_dense_tensors",
    "foreach_add",
    "foreach_add_",
    "foreach_addcdiv_",
    "foreach_addcmul_",
    "foreach_copy_",
    "foreach_div",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sqrt",
    "foreach_sub",
    "fused_adagrad_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "unflatten_dense_tensors",
]

amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sub = torch._foreach_sub

fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

flatten_dense_tensors: Any = torch._utils._flatten_dense_tensors
unflatten_dense_tensors: Any = torch._utils._unflatten_dense_tensors
