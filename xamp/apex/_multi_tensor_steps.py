"""The steps of optimizers over lists of tensors: the other part of ``amp_C``, but for LAMB. All arithmetic is in fp32.

Each function takes ``(chunk_size, noop_flag, tensor_lists, *arguments)`` and writes into the lists. Where Apex's kernel
reads the flag (SGD, the capturable Adams), nothing changes if the flag is set; the host does not wait for it. The
others let inf and nan through, as Apex's do. The capturable Adams leave the gradients unscaled, as Apex's do. No other
function changes gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.apex._multi_tensor import multi_tensor_norm_out
from xamp.apex._tensor_lists import Lists, floats, number, store
from xamp.ground.torch_private import operators

__all__ = [
    "moments_update",
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
]


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Take a step of SGD. Lists: gradients, parameters, momenta and, if there is a fourth, 16-bit copies to write.

    ``first_run``: the momenta hold nothing yet. ``scale``: the gradients are multiplied by this first.
    """
    grads, params, momenta, *copies = tensor_lists
    if not len(grads):
        return
    old = floats(params)
    step = list(operators.foreach_mul(floats(grads), scale))
    if wd != 0.0 and not wd_after_momentum:
        operators.foreach_add_(step, old, alpha=wd)
    if momentum != 0.0:
        if first_run:
            moving = [s.clone() for s in step]
        else:
            moving = list(operators.foreach_mul(floats(momenta), momentum))
            operators.foreach_add_(moving, step, alpha=1.0 - dampening)
        store(momenta, moving, noop_flag)
        step = list(operators.foreach_add(step, moving, alpha=momentum)) if nesterov else moving
    if wd != 0.0 and wd_after_momentum:
        step = list(operators.foreach_add(step, old, alpha=wd))
    new = operators.foreach_add(old, step, alpha=-lr)
    for targets in (params, *copies):
        store(targets, new, noop_flag)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam. Lists: gradients, parameters, first moments, second moments.

    ``mode`` 0 adds the weight decay to the gradient; 1 decays the parameter itself (AdamW).
    """
    _adam(
        tensor_lists[:4],
        tensor_lists[1:2],
        None,
        lr,
        (beta1, beta2),
        epsilon,
        step,
        mode,
        bias_correction,
        weight_decay,
    )


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Take a step of Adam with learning rate, step and ``inv_scale``, which gradients are multiplied by, as tensors."""
    lists = [_unscaled(tensor_lists[0], inv_scale, noop_flag), *tensor_lists[1:4]]
    _adam(lists, tensor_lists[1:2], noop_flag, lr, (beta1, beta2), epsilon, step, mode, bias_correction, weight_decay)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Do as :func:`multi_tensor_adam_capturable`, on masters, the fifth list, which are then written to the second."""
    grads, params, exp_avgs, exp_avg_sqs, masters = tensor_lists
    lists = [_unscaled(grads, inv_scale, noop_flag), masters, exp_avgs, exp_avg_sqs]
    targets = [masters, params]
    _adam(lists, targets, noop_flag, lr, (beta1, beta2), epsilon, step, mode, bias_correction, weight_decay)


def _unscaled(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor, skip: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients times ``inv_scale`` in fp32, and write them back."""
    if not len(grads):
        return []
    unscaled = list(operators.foreach_mul(floats(grads), number(inv_scale)))
    store(grads, unscaled, skip)
    return unscaled


def _adam(
    lists: Lists,
    targets: Lists,
    skip: torch.Tensor | None,
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    step: Any,
    mode: int,
    corrects: int,
    decay: float,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs = lists
    if not len(grads):
        return
    # The order of operations is that of torch.optim's Adam and AdamW, so that fp32 steps equal theirs bit for bit.
    old, used = floats(params), floats(grads)
    rate = number(lr)
    if mode == 0 and decay != 0.0:
        used = list(operators.foreach_add(used, old, alpha=decay))
    if mode != 0 and decay != 0.0:
        old = list(operators.foreach_mul(old, 1.0 - rate * decay))
    first = list(operators.foreach_lerp(floats(exp_avgs), used, 1.0 - betas[0]))
    second = list(operators.foreach_mul(floats(exp_avg_sqs), betas[1]))
    operators.foreach_addcmul_(second, used, used, value=1.0 - betas[1])
    store(exp_avgs, first, skip)
    store(exp_avg_sqs, second, skip)
    denominators = list(operators.foreach_sqrt(second))
    if corrects:
        rate = rate / _correction(betas[0], step)
        operators.foreach_div_(denominators, _correction(betas[1], step) ** 0.5)
    operators.foreach_add_(denominators, eps)
    if isinstance(rate, torch.Tensor):
        update = operators.foreach_mul(operators.foreach_div(first, denominators), rate)
        new = operators.foreach_sub(old, update)
    else:
        new = operators.foreach_addcdiv(old, first, denominators, value=-rate)
    for target in targets:
        store(target, new, skip)


def moments_update(
    grads: list[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    skip: torch.Tensor | None,
    betas: tuple[float, float],
    beta3: float,
    eps: float,
    step: Any,
    corrects: int,
) -> list[torch.Tensor]:
    """Update both moments and return ``m / (sqrt(v) + eps)``, with bias correction where it is asked for."""
    beta1, beta2 = betas
    first = list(operators.foreach_mul(floats(exp_avgs), beta1))
    operators.foreach_add_(first, grads, alpha=beta3)
    second = list(operators.foreach_mul(floats(exp_avg_sqs), beta2))
    operators.foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
    store(exp_avgs, first, skip)
    store(exp_avg_sqs, second, skip)
    if corrects:
        first = list(operators.foreach_div(first, _correction(beta1, step)))
        second = list(operators.foreach_div(second, _correction(beta2, step)))
    denominators = list(operators.foreach_sqrt(second))
    operators.foreach_add_(denominators, eps)
    return list(operators.foreach_div(first, denominators))


def _correction(beta: float, step: Any) -> Any:
    """Return ``1 - beta**step``; as a tensor where ``step`` is one."""
    if isinstance(step, torch.Tensor):
        return (1.0 - torch.pow(beta, number(step).double())).float()
    return 1.0 - beta**step


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Take a step of Adagrad. Lists: gradients, parameters, sums of squares. ``mode``: :func:`multi_tensor_adam`."""
    grads, params, sums = tensor_lists
    if not len(grads):
        return
    old, used = floats(params), list(floats(grads))
    if mode == 0 and weight_decay != 0.0:
        used = list(operators.foreach_add(used, old, alpha=weight_decay))
    total = operators.foreach_addcmul(floats(sums), used, used)
    store(sums, total)
    denominators = operators.foreach_sqrt(total)
    operators.foreach_add_(denominators, epsilon)
    if mode != 0 and weight_decay != 0.0:
        old = list(operators.foreach_mul(old, 1.0 - lr * weight_decay))
    store(params, operators.foreach_addcdiv(old, used, denominators, value=-lr))


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    grad_norms: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Take a step of NovoGrad. Lists: gradients, parameters, first moments.

    Args:
        chunk_size: makes no difference.
        noop_flag: becomes 1 where a gradient is inf or nan.
        tensor_lists: see above.
        grad_norms: fp32, the moving norm of each tensor, in the order of the lists; changed in place.
        lr: the learning rate.
        beta1: of the first moments.
        beta2: of the norms.
        epsilon: added to each norm.
        step: counts from 1; for the bias correction.
        bias_correction: whether to correct, 0 or 1.
        weight_decay: see ``mode``.
        grad_averaging: 1 weighs a new gradient by ``1 - beta1``, 0 by 1.
        mode: 0 puts norm and decay into the first moment, 1 applies them to the update.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.
    """
    grads, params, exp_avgs = tensor_lists
    if not len(grads):
        return
    multi_tensor_norm_out(chunk_size, noop_flag, [grads], grad_norms, beta2, 1.0 - beta2, norm_type)
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    first_correction = 1.0 - beta1**step if bias_correction else 1.0
    norm_correction = (1.0 - beta2**step) ** 0.5 if bias_correction else 1.0
    denominators = list((grad_norms / norm_correction + epsilon).unbind())
    old, used = floats(params), floats(grads)
    first = list(operators.foreach_mul(floats(exp_avgs), beta1))
    if mode == 0:
        used = list(operators.foreach_div(used, denominators))
        operators.foreach_add_(used, old, alpha=weight_decay)
    operators.foreach_add_(first, used, alpha=beta3)
    store(exp_avgs, first)
    update = list(operators.foreach_div(first, first_correction))
    if mode != 0:
        update = list(operators.foreach_div(update, denominators))
        operators.foreach_add_(update, old, alpha=weight_decay)
    store(params, operators.foreach_add(old, update, alpha=-lr))
