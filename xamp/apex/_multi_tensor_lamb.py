"""The steps of LAMB over lists of tensors: the part of ``amp_C`` that FusedLAMB calls. All arithmetic is in fp32.

Each function takes ``(chunk_size, noop_flag, tensor_lists, *arguments)`` and writes into the lists. Only the
mixed-precision step reads the flag, as Apex's kernels do: nothing changes if it is set, and the host does not wait for
it. Apex's LAMB leaves its update in the gradients; these functions leave gradients as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.apex._multi_tensor_steps import moments_update
from xamp.apex._tensor_lists import Lists, floats, norms, number, store
from xamp.ground.torch_private import operators

__all__ = [
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
]


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Take a step of LAMB. Lists: gradients, parameters, first moments, second moments.

    Args:
        chunk_size: makes no difference.
        noop_flag: is not read.
        tensor_lists: see above.
        lr: the learning rate.
        beta1: of the first moments.
        beta2: of the second moments.
        epsilon: added to the root of the second moments.
        step: counts from 1; for the bias correction.
        bias_correction: whether to correct, 0 or 1.
        weight_decay: see ``mode``.
        grad_averaging: 1 weighs a new gradient by ``1 - beta1``, 0 by 1.
        mode: 0 adds the weight decay to the gradient; 1 to the update (AdamW).
        global_grad_norm: norm of all gradients, one element.
        max_grad_norm: gradients are divided by ``global_grad_norm / max_grad_norm`` where that is above 1.
        use_nvlamb: scale the update by ``norm of parameter / norm of update`` also where ``weight_decay`` is 0.
    """
    grads, params, *moments = tensor_lists
    if not len(grads):
        return
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    scaled = _clipped(floats(grads), global_grad_norm, max_grad_norm)
    options = ((beta1, beta2), beta3, epsilon, step, bias_correction, weight_decay, mode)
    update = _lamb_update(scaled, params, moments, None, *options)
    new = _lamb_apply(params, update, lr, weight_decay, bool(use_nvlamb))
    store(params, new)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: torch.Tensor,
    use_nvlamb: bool | None,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Take a step of LAMB on scaled gradients, with learning rate, step and scale as tensors.

    Lists: gradients, parameters (masters where there is a fifth list), first and second moments, and 16-bit copies of
    the parameters to write. As in Apex, gradients are multiplied by ``inv_scale`` and clipped by the ratio of
    ``global_grad_norm`` and ``max_grad_norm``, both of scaled gradients. Other arguments: :func:`multi_tensor_lamb`.
    """
    grads, params, exp_avgs, exp_avg_sqs, *copies = tensor_lists
    if not len(grads):
        return
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    unscaled = operators.foreach_mul(floats(grads), number(inv_scale))
    scaled = _clipped(unscaled, global_grad_norm, max_grad_norm)
    options = ((beta1, beta2), beta3, epsilon, step, bias_correction, weight_decay, mode)
    update = _lamb_update(scaled, params, [exp_avgs, exp_avg_sqs], noop_flag, *options)
    new = _lamb_apply(params, update, lr, weight_decay, bool(use_nvlamb))
    for targets in (params, *copies):
        store(targets, new, noop_flag)


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: torch.Tensor,
    max_global_grad_norm: float,
) -> None:
    """Compute the update of LAMB into the fifth list. ``step`` counts from 0; each tensor has a decay."""
    grads, params, exp_avgs, exp_avg_sqs, updates = tensor_lists
    scaled = _clipped(floats(grads), global_grad_norm, max_global_grad_norm)
    betas = (beta1, beta2)
    update = moments_update(scaled, exp_avgs, exp_avg_sqs, None, betas, 1.0 - beta1, epsilon, step + 1, 1)
    operators.foreach_add_(update, operators.foreach_mul(floats(params), list(per_tensor_decay.unbind())))
    store(updates, update)


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Subtract the updates of stage 1, the second list, from the parameters, with LAMB's ratio of norms."""
    params, updates = tensor_lists
    ratios = _ratios(per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay, bool(use_nvlamb))
    store(params, operators.foreach_sub(floats(params), operators.foreach_mul(floats(updates), ratios)))


def _clipped(grads: Sequence[torch.Tensor], norm: torch.Tensor, limit: Any) -> list[torch.Tensor]:
    norm, limit = number(norm).float(), number(limit)
    return list(operators.foreach_div(list(grads), torch.where(norm > limit, norm / limit, torch.ones_like(norm))))


def _lamb_update(
    grads: list[torch.Tensor],
    params: Sequence[torch.Tensor],
    moments: Lists,
    skip: torch.Tensor | None,
    betas: tuple[float, float],
    beta3: float,
    eps: float,
    step: Any,
    corrects: int,
    decay: float,
    mode: int,
) -> list[torch.Tensor]:
    old = floats(params)
    if mode == 0 and decay != 0.0:
        grads = list(operators.foreach_add(grads, old, alpha=decay))
    update = moments_update(grads, moments[0], moments[1], skip, betas, beta3, eps, step, corrects)
    if mode != 0 and decay != 0.0:
        operators.foreach_add_(update, old, alpha=decay)
    return update


def _lamb_apply(
    params: Sequence[torch.Tensor], update: list[torch.Tensor], lr: Any, decay: float, use_nvlamb: bool
) -> list[torch.Tensor]:
    """Return the new parameters, in fp32."""
    ratios = _ratios(norms(params), norms(update), lr, decay, use_nvlamb)
    return list(operators.foreach_sub(floats(params), operators.foreach_mul(update, ratios)))


def _ratios(
    param_norms: torch.Tensor, update_norms: torch.Tensor, lr: Any, decay: float, use_nvlamb: bool
) -> list[torch.Tensor]:
    """Return by what each update is multiplied: the learning rate, times the ratio of norms where LAMB applies it."""
    rates = torch.ones_like(param_norms) * number(lr)
    if not (use_nvlamb or decay != 0.0):
        return list(rates.unbind())
    known = (param_norms != 0.0) & (update_norms != 0.0)
    return list(torch.where(known, rates * (param_norms / update_norms), rates).unbind())
