"""Apex's extension module ``amp_C`` in torch's own operators, for any device.

The functions, their arguments and what they do to the flag are Apex's. :mod:`xamp.apex._multi_tensor`,
:mod:`xamp.apex._multi_tensor_steps` and :mod:`xamp.apex._multi_tensor_lamb` say what differs.
"""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

from xamp.apex._multi_tensor import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_maxnorm,
    multi_tensor_norm_out,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale_hysteresis,
)
from xamp.apex._multi_tensor_lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from xamp.apex._multi_tensor_steps import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_novograd,
    multi_tensor_sgd,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_maxnorm",
    "multi_tensor_norm_out",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
