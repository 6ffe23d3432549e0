"""The steps of optimizers over lists of tensors: the other part of ``amp_C``, but for LAMB. All arithmetic is in fp32.

Each function takes ``(chunk_size, noop_flag, tensor_lists, *arguments)`` and writes into the lists. Where Apex's kernel
reads the flag (SGD, the capturable Adams), nothing changes if the flag is set; the host does not wait for it. The
others let inf and nan through, as Apex's do. The capturable Adams leave the gradients unscaled, as Apex's do. No other
function changes gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xamp import updates
from xamp.apex._multi_tensor import limit_of, multi_tensor_norm_out, number, raise_flag
from xamp.onepass import Rule
from xamp.plans import lists as one_pass
from xamp.torch_compat import pieces
from xamp.torch_compat.pieces import Lists, Piece
from xamp.torch_compat.torch_private import operators

__all__ = [
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
    scale: Any,
) -> None:
    """Take a step of SGD. Lists: gradients, parameters, momenta and, if there is a fourth, 16-bit copies to write.

    ``first_run``: the momenta hold nothing yet. ``scale``: the gradients are multiplied by this first; a number or,
    unlike in Apex, a tensor.
    """
    grads, params, momenta, *copies = tensor_lists
    numbers = {"lr": lr, "weight_decay": wd, "momentum": momentum, "dampening": dampening}
    numbers |= {"nesterov": nesterov, "is_first_step": first_run}
    lists = [grads, params, *([momenta] if momentum != 0.0 else [])]
    sgd = Rule("sgd", wd_after_momentum=wd_after_momentum)
    if one_pass.step(sgd, lists, numbers, copies=copies, skip=noop_flag, scale=scale):
        return
    if one_pass.is_one(scale) and not (wd != 0.0 and wd_after_momentum) and updates.has_fused(torch.optim.SGD, lists):
        rule = functools.partial(updates.fused_sgd_, skip=noop_flag, numbers=numbers)
        pieces.apply(rule, lists, limit_of(lists), copies, noop_flag, obeys=True)
    else:
        rule = functools.partial(updates.sgd_, scale=scale, decay_last=wd_after_momentum, numbers=numbers)
        pieces.apply(rule, lists, limit_of(lists), copies, noop_flag)


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
    divisor: torch.Tensor | None = None,
) -> None:
    """Take a step of Adam. Lists: gradients, parameters, first moments, second moments.

    ``mode`` 0 adds the weight decay to the gradient; 1 decays the parameter itself (AdamW). ``divisor``: not in Apex;
    the gradients are divided by it first.
    """
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": epsilon, "weight_decay": weight_decay}
    _adam(tensor_lists, (), None, None, (step, mode, bias_correction), numbers, divisor)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor | None,
) -> None:
    """Take a step of Adam with learning rate, step and ``inv_scale``, which gradients are multiplied by, as tensors.

    Unlike in Apex the flag and ``inv_scale`` may be None. Lists behind the moments get the new parameters.
    """
    numbers = {"lr": number(lr), "beta1": beta1, "beta2": beta2, "eps": epsilon, "weight_decay": weight_decay}
    lists, copies = tensor_lists[:4], tensor_lists[4:]
    _adam(lists, copies, noop_flag, inv_scale, (step, mode, bias_correction), numbers)


def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: Lists, *arguments: Any
) -> None:
    """Do as :func:`multi_tensor_adam_capturable`, on masters, the fifth list, which are then written to the second."""
    grads, params, exp_avgs, exp_avg_sqs, masters = tensor_lists
    multi_tensor_adam_capturable(chunk_size, noop_flag, [grads, masters, exp_avgs, exp_avg_sqs, params], *arguments)


def _adam(
    lists: Lists,
    copies: Lists,
    skip: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    options: tuple[Any, int, int],
    numbers: dict[str, Any],
    divisor: torch.Tensor | None = None,
) -> None:
    adam = Rule("adam", decoupled=options[1] != 0)
    if one_pass.step(adam, lists, numbers, options[::2], copies, skip, inv_scale, divisor):
        if inv_scale is not None:  # it gets into the gradients
            one_pass.scale_(lists[0], number(inv_scale), limit_of(lists), skip)
        return
    is_fused = updates.has_fused(torch.optim.AdamW if options[1] else torch.optim.Adam, lists)

    def rule(piece: Piece) -> None:
        if inv_scale is not None:  # what is written into the fifth list gets into the gradients
            *states, grads = piece[1:]
            factor = number(inv_scale)
            factor = factor if skip is None else torch.where(skip.reshape(()) != 0, torch.ones_like(factor), factor)
            operators.foreach_mul_(grads, factor)
            piece = [grads, *states]
        if divisor is not None:
            piece = [list(operators.foreach_div(piece[0], divisor)), *piece[1:]]
        if is_fused:
            updates.fused_adam_(piece, *options, skip, numbers)
        else:
            updates.adam_(piece, *options, numbers)

    lists = lists if inv_scale is None else [*lists, lists[0]]
    pieces.apply(rule, lists, limit_of(lists), copies, skip, is_fused)


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
    numbers = {"lr": lr, "eps": epsilon, "weight_decay": weight_decay}
    if one_pass.step(Rule("adagrad", decoupled=mode != 0), tensor_lists, numbers):
        return
    rule = functools.partial(updates.adagrad_, mode=mode, numbers=numbers)
    pieces.apply(rule, tensor_lists, limit_of(tensor_lists))


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
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
        noop_flag: becomes 1 where a gradient is inf or nan; unlike in Apex it may be None.
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
    grads = tensor_lists[0]
    if not len(grads):
        return
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "beta3": 1.0 - beta1 if grad_averaging else 1.0}
    numbers |= {"eps": epsilon, "weight_decay": weight_decay}
    lists, counted = [*tensor_lists, grad_norms.unbind()], (step, bias_correction)
    if one_pass.step(Rule("novograd", decoupled=mode != 0), lists, numbers | {"norm_type": norm_type}, counted):
        raise_flag(noop_flag, grads)
        return
    multi_tensor_norm_out(chunk_size, noop_flag, [grads], grad_norms, beta2, 1.0 - beta2, norm_type)
    correction = 1.0 - beta1**step if bias_correction else 1.0
    norm_correction = (1.0 - beta2**step) ** 0.5 if bias_correction else 1.0
    divisors = list((grad_norms / norm_correction + epsilon).unbind())
    rule = functools.partial(updates.novograd_, correction=correction, mode=mode, numbers=numbers)
    limit = limit_of(tensor_lists)
    for places, group in pieces.groups(tensor_lists, limit):
        pieces.apply(functools.partial(rule, divisors=divisors[places]), group, limit)
