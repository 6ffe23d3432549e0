"""The part of ``apex.amp`` that an O2 run uses, by Apex's names, written for tests: masters are made late."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch


class _Scaler:
    def __init__(self, loss_scale: Any, floor: float | None, ceiling: float) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(2.0**16, ceiling) if self.dynamic else float(loss_scale)
        self._floor = floor
        self._unskipped = 0

    def loss_scale(self) -> float:
        return self._loss_scale

    def update(self, overflowed: bool) -> bool:
        skips = overflowed and self.dynamic
        if skips:
            self._loss_scale = max(self._loss_scale / 2.0, self._floor or 0.0)
        self._unskipped = 0 if skips else self._unskipped + 1
        return skips


_amp_state = types.SimpleNamespace(loss_scalers=[])


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    if opt_level not in ("O0", "O2"):
        raise RuntimeError(f"Unexpected optimization level {opt_level}. ")
    for model in models if opt_level == "O2" else ():
        model.half()
        forward = model.forward
        model.forward = lambda x, forward=forward: forward(x.half()).float()
    for optimizer in optimizers or ():
        _process(optimizer, bool(master_weights))
    _amp_state.loss_scalers = [_Scaler(loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    return models if optimizers is None else (models, optimizers)


def _process(optimizer: Any, masters: bool) -> None:
    stash = optimizer._amp_stash = types.SimpleNamespace(
        lazy_init_called=False, already_patched=False, all_fp16_params=[], all_fp32_from_fp16_params=[]
    )

    def lazy_init() -> None:
        stash.lazy_init_called = True
        for group in optimizer.param_groups if masters else ():
            for index, param in enumerate(group["params"]):
                if param.dtype == torch.float16:
                    master = torch.nn.Parameter(param.detach().clone().float())
                    group["params"][index] = master
                    stash.all_fp16_params.append(param)
                    stash.all_fp32_from_fp16_params.append(master)

    step = optimizer.step

    def new_step() -> Any:
        result = step()
        with torch.no_grad():
            for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
                param.copy_(master)
        return result

    optimizer._amp_lazy_init = lazy_init
    optimizer.step = new_step


@contextlib.contextmanager
def scale_loss(loss: Any, optimizers: Any, loss_id: int = 0, **_: Any) -> Iterator[Any]:
    scaler = _amp_state.loss_scalers[loss_id]
    for optimizer in optimizers:
        if not optimizer._amp_stash.lazy_init_called:
            optimizer._amp_lazy_init()
        for param in optimizer._amp_stash.all_fp16_params:
            param.grad = None
    yield loss.float() * scaler.loss_scale()
    overflowed = False
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
            master.grad = param.grad.float() / scaler.loss_scale()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not stash.all_fp16_params:
                    param.grad.div_(scaler.loss_scale())
                overflowed |= not bool(param.grad.isfinite().all())
    if scaler.update(overflowed):
        for optimizer in optimizers:
            _skip_once(optimizer)


def _skip_once(optimizer: Any) -> None:
    step = optimizer.step
    optimizer._amp_stash.already_patched = True

    def skip_step() -> None:
        optimizer.step = step
        optimizer._amp_stash.already_patched = False

    optimizer.step = skip_step
