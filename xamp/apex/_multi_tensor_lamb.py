"""The steps of LAMB over lists of tensors: the part of ``amp_C`` that FusedLAMB calls. All arithmetic is in fp32.

Each function takes ``(chunk_size, noop_flag, tensor_lists, *arguments)`` and writes into the lists. Only the
mixed-precision step reads the flag, as Apex's kernels do: nothing changes if it is set, and the host does not wait for
it. Apex's LAMB leaves its update in the gradients; these functions leave gradients as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from xamp import updates
from xamp.apex._multi_tensor import joined, limit_of, norms, number, split
from xamp.onepass import Rule
from xamp.plans import lists as one_pass
from xamp.torch_compat.pieces import Lists, Piece, cut, floats, groups, opened, store
from xamp.torch_compat.torch_private import operators

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
    numbers = _numbers(lr, beta1, beta2, epsilon, weight_decay, grad_averaging)
    divisor = _divisor(global_grad_norm, max_grad_norm)
    _lamb(tensor_lists, None, None, divisor, (step, bias_correction, mode), use_nvlamb, numbers)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
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
    max_grad_norm: Any,
    use_nvlamb: bool | None,
    found_inf: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
) -> None:
    """Take a step of LAMB on scaled gradients, with learning rate, step and scale as tensors.

    Lists: gradients, parameters (masters where there is a fifth list), first and second moments, and 16-bit copies of
    the parameters to write. As in Apex, gradients are multiplied by ``inv_scale`` and clipped by the ratio of
    ``global_grad_norm`` and ``max_grad_norm``, both of scaled gradients. Other arguments: :func:`multi_tensor_lamb`.
    """
    numbers = _numbers(lr, beta1, beta2, epsilon, weight_decay, grad_averaging)
    divisor = _divisor(global_grad_norm, max_grad_norm)
    _lamb(tensor_lists, noop_flag, inv_scale, divisor, (step, bias_correction, mode), use_nvlamb, numbers)


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
    divisor, decays = _divisor(global_grad_norm, max_global_grad_norm), list(per_tensor_decay.unbind())
    numbers = _numbers(0.0, beta1, beta2, epsilon, 0.0, 1)
    for places, piece in split(tensor_lists):
        grads, params, *kept, targets = piece
        moments = [opened(tensors) for tensors in kept]
        scaled = list(operators.foreach_div(floats(grads), divisor))
        found = updates.moments_([scaled, *moments], step + 1, 1, numbers)
        operators.foreach_add_(found, operators.foreach_mul(floats(params), decays[places]))
        for written, values in zip((*kept, targets), (*moments, found), strict=True):
            store(written, values)


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
    ratios = _ratios(per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay, bool(use_nvlamb))
    for places, (params, update) in split(tensor_lists):
        new = opened(params)
        operators.foreach_add_(new, operators.foreach_mul(floats(update), ratios[places]), alpha=-1.0)
        store(params, new)


def _numbers(lr: Any, beta1: float, beta2: float, eps: float, decay: float, averages: int) -> dict[str, Any]:
    found = {"lr": number(lr), "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    return {**found, "beta3": 1.0 - beta1 if averages else 1.0}


def _divisor(norm: torch.Tensor, limit: Any) -> torch.Tensor:
    norm, limit = number(norm).float(), number(limit)
    return torch.where(norm > limit, norm / limit, torch.ones_like(norm))


def _lamb(
    lists: Lists,
    skip: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    divisor: torch.Tensor,
    options: tuple[Any, int, int],
    use_nvlamb: bool | None,
    numbers: dict[str, Any],
) -> None:
    """Step parameters and moments, and write the new parameters into the lists behind them."""
    lamb = Rule("lamb", decoupled=options[2] != 0, use_nvlamb=bool(use_nvlamb))
    if one_pass.step(lamb, lists[:4], numbers, options[:2], lists[4:], skip, inv_scale, divisor):
        return

    def update_of(piece: Piece, moments: Piece) -> list[torch.Tensor]:
        grads, params = map(floats, piece[:2])
        if inv_scale is not None:
            grads = list(operators.foreach_mul(grads, number(inv_scale)))
        grads = list(operators.foreach_div(grads, divisor))
        return _update([grads, params, *moments], *options, numbers)

    def norms_of(piece: Piece) -> torch.Tensor:
        return norms(update_of(piece, [opened(tensors, apart=True) for tensors in piece[2:4]]))

    def step_piece(piece: Piece, sizes: torch.Tensor, changes: torch.Tensor | None) -> None:
        moments = [opened(tensors, skip is not None) for tensors in piece[2:4]]
        update = update_of(piece, moments)
        changes = norms(update) if changes is None else changes
        ratios = _ratios(sizes, changes, numbers["lr"], numbers["weight_decay"], bool(use_nvlamb))
        operators.foreach_mul_(update, ratios)
        new = opened(piece[1], skip is not None)
        operators.foreach_add_(new, update, alpha=-1.0)
        for targets, values in zip(piece[1:], (new, *moments, *[new] * len(piece[4:])), strict=True):
            store(targets, values, skip)

    limit, is_scaled = limit_of(lists), bool(use_nvlamb) or numbers["weight_decay"] != 0.0
    for _, group in groups(lists, limit):
        parts = list(cut(group, limit))
        # The update of a large tensor is computed twice, first for its norm: kept, it would be as large as the tensor.
        changes = joined([norms_of(part) for part in parts]) if len(parts) > 1 and is_scaled else None
        sizes = norms(group[1])
        for part in parts:
            step_piece(part, sizes, changes)


def _update(lists: Piece, step: Any, corrects: int, mode: int, numbers: dict[str, Any]) -> list[torch.Tensor]:
    grads, params, *moments = lists
    decay = numbers["weight_decay"]
    if mode == 0 and decay != 0.0:
        grads = list(operators.foreach_add(grads, params, alpha=decay))
    update = updates.moments_([grads, *moments], step, corrects, numbers)
    if mode != 0 and decay != 0.0:
        operators.foreach_add_(update, params, alpha=decay)
    return update


def _ratios(
    param_norms: torch.Tensor, update_norms: torch.Tensor, lr: Any, decay: float, use_nvlamb: bool
) -> list[torch.Tensor]:
    """Return by what each update is multiplied: the learning rate, times the ratio of norms where LAMB applies it."""
    rates = torch.ones_like(param_norms) * number(lr)
    if not (use_nvlamb or decay != 0.0):
        return list(rates.unbind())
    known = (param_norms != 0.0) & (update_norms != 0.0)
    return list(torch.where(known, rates * (param_norms / update_norms), rates).unbind())
