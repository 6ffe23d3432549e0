"""Steps of ``xamp.apex``'s optimizers: bytes beyond what they hold between steps, bytes moved, calls of operators.

Storages and calls are counted, not timed, so the figures hold on every device with the same kernels. There are as many
elements as 16 pieces of lists have. Times are taken on an accelerator only, beside torch's AdamW in its fused form.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import bounds
from benchmarks.report import Figure
from benchmarks.timing import compare
from xamp.apex import optimizers
from xamp.apex._multi_tensor import limit_of
from xamp.registry.registry import HOST
from xamp.testing.measure import Storages
from xamp.torch_compat.torch_private.modes import TorchDispatchMode, tree_iter

TENSORS = 64

Make = Callable[[Any], torch.optim.Optimizer]
FORMS: dict[str, tuple[Make, torch.dtype]] = {
    "FusedAdam": (lambda p: optimizers.FusedAdam(p, weight_decay=0.1), torch.float32),
    "FusedAdam of fp16": (lambda p: optimizers.FusedAdam(p, weight_decay=0.1), torch.float16),
    "FusedAdam with masters": (
        lambda p: optimizers.FusedAdam(p, weight_decay=0.1, capturable=True, master_weights=True),
        torch.float16,
    ),
    "FusedSGD": (lambda p: optimizers.FusedSGD(p, lr=1e-3, momentum=0.9), torch.float32),
    "FusedLAMB": (lambda p: optimizers.FusedLAMB(p), torch.float32),
    "FusedMixedPrecisionLamb": (
        lambda p: optimizers.FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.float16),
        torch.float16,
    ),
    "FusedNovoGrad": (lambda p: optimizers.FusedNovoGrad(p, weight_decay=0.1), torch.float32),
    "FusedAdagrad": (lambda p: optimizers.FusedAdagrad(p, weight_decay=0.1), torch.float32),
    "NpuFusedAdamW": (lambda p: optimizers.NpuFusedAdamW(p), torch.float32),
    "NpuFusedLamb": (lambda p: optimizers.NpuFusedLamb(p, use_global_grad_norm=True), torch.float32),
}

TORCHS_OWN = ("NpuFusedAdamW",)
"""What steps as a class of torch's does: on an accelerator with temporaries of all its parameters."""


def run(device: torch.device, rounds: int) -> list[Figure]:
    figures = []
    for name, (make, dtype) in FORMS.items():
        params = _params(dtype, device)
        optimizer = make(params)
        count = sum(param.numel() for param in params)
        beyond = _beyond(optimizer, params) / count
        moves = Moves()
        with moves:
            optimizer.step()
        bound = None if name in TORCHS_OWN else bounds.APEX_OPTIMIZER_BEYOND_BYTES
        detail = f"{moves.bytes / count:.1f} bytes moved, {moves.calls} calls of operators"
        figures.append(Figure(f"{name}: beyond its states", beyond, "bytes", bound, detail))
        if device.type != HOST:
            figures.append(_timed(name, optimizer, dtype, device, rounds))
        del params, optimizer
        gc.collect()
    return figures


def _params(dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    length = 16 * limit_of([[torch.empty(0, device=device)]]) // TENSORS
    params = [nn.Parameter(torch.full((length // 64, 64), 0.5, dtype=dtype, device=device)) for _ in range(TENSORS)]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    return params


def _beyond(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> int:
    """Take two steps and return the bytes at the peak of the second, less those before it."""
    with Storages(params[0].device.type) as storages:
        storages.note([*params, *(param.grad for param in params)])
        optimizer.step()
        storages.lap()
        before = storages.lap()
        optimizer.step()
        peak: int = storages.lap() - before
    return peak


def _timed(name: str, optimizer: Any, dtype: torch.dtype, device: torch.device, rounds: int) -> Figure:
    beside = torch.optim.AdamW(_params(torch.float32, device), fused=True)
    pair = compare(optimizer.step, beside.step, device, calls=3, rounds=max(min(5, rounds), rounds // 10), warm_up=5)
    detail = f"{pair.ours:9.1f} us : {pair.theirs:9.1f} us"
    return Figure(f"{name}: time over torch's fused AdamW", pair.ratio, "ratio", None, detail, pair.ratio_spread)


class Moves(TorchDispatchMode):
    """Counts calls of operators that compute or copy, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [v for v in tree_iter((args, kwargs)) if isinstance(v, torch.Tensor)]
        made = [v for v in tree_iter(result) if isinstance(v, torch.Tensor)]
        name = str(func).split(".")[1]
        held = {t.untyped_storage().data_ptr() for t in given}
        is_view = not name.endswith("_") and any(t.untyped_storage().data_ptr() in held for t in made)
        if is_view or not (given or made):  # the profiler's have no tensors
            return result
        read, written = given, made
        if name.endswith("_"):
            written = [v for v in tree_iter(args[0]) if isinstance(v, torch.Tensor)]
        if name.startswith("_fused"):  # all but the gradients, which are the second list
            written = given[: len(args[0])] + given[2 * len(args[0]) :]
        if name.endswith(("copy_", "fill_", "zero_")):
            read = given[len(written) :]
        self.calls += 1
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))
        return result
