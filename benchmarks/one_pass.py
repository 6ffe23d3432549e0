"""Bytes and launches of a step in one pass, counted: they do not depend on the device. Triton interprets on a CPU."""

from __future__ import annotations

import torch

from benchmarks import bounds
from benchmarks.report import Figure
from xamp import onepass
from xamp.plans import available

SHAPES = ((64, 64), (64,), (7, 33), (1,))


def refusal(device: torch.device) -> str:
    """Why the kernels cannot run here; empty where they can."""
    return available.refusal(device)


def counts(device: torch.device) -> list[Figure]:
    """Count AdamW at O2 over tensors of several shapes and groups, all of one combination of dtypes."""
    if (why := refusal(device)) and available.expects(device):
        raise RuntimeError(f"the kernels should run on {device}, and do not: {why}")
    if why:
        return [Figure(f"one pass left out: {why}", 0.0, "bytes")]
    dtype = torch.float16
    rows, grads = [], []
    for number, shape in enumerate(SHAPES):
        master = torch.randn(shape, device=device)
        states = torch.zeros_like(master), torch.zeros_like(master)
        count = torch.zeros((), device=device)
        rows.append(onepass.Row(master, master.to(dtype), states, count, group=number // 2))
        grads.append(torch.randn(shape, device=device).to(dtype))
    plan = available.plan(onepass.Rule("adam", decoupled=True), rows)
    found, inverse = torch.zeros((), device=device), torch.ones((), device=device)
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay} for decay in (0.0, 0.1)]
    figures = []
    for clips in (False, True):
        plan.check(grads, found, groups)
        factor = plan.clip_factor(grads, plan.checked_norm(inverse), 1.0) if clips else None
        plan.step(grads, groups, found, inverse, factor)
        bound = bounds.ONE_PASS_CLIPPED_LAUNCHES if clips else bounds.ONE_PASS_LAUNCHES
        name = "one pass, AdamW at O2: launches" + (" with clipping" if clips else "")
        figures.append(Figure(name, float(plan.launches), "launches", float(bound)))
        grads = [grad.clone() for grad in grads]  # which lie elsewhere, as those of each backward may
    moved = sum(map(bytes_moved, rows, grads)) / sum(row.param.numel() for row in rows)
    figures.append(Figure("one pass, AdamW at O2: bytes moved a parameter", moved, "bytes", bounds.ONE_PASS_MOVED))
    return figures


def bytes_moved(row: onepass.Row, grad: torch.Tensor) -> int:
    """What a check and a step read and write of a row: the gradient twice, each fp32 tensor in and out, the weight out.

    Kernels load and store each element of each tensor once, but for the gradient, which the check loads too.
    """
    kept = sum(tensor.element_size() for tensor in (row.param, *row.states))
    low = 0 if row.low is None else row.low.element_size()
    return grad.numel() * (2 * grad.element_size() + 2 * kept + low)
