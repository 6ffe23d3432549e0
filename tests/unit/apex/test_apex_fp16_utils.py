"""``xamp.apex.fp16_utils`` and the older ``FP16_Optimizer`` against a hand-written loop with fp32 masters.

Covers: xamp.apex.fp16_utils, xamp.apex.contrib.optimizers, xamp.apex.optimizers._older.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xamp.apex import fp16_utils, optimizers
from xamp.apex.contrib import optimizers as older
from xamp.errors import CheckpointError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _half() -> nn.Module:
    return fp16_utils.convert_network(_model(), torch.float16)


def _loss(model: nn.Module, seed: int, factor: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator)
    for layer in model.children():
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        x = layer(x.to(weight.dtype))
    return x.float().square().mean() * factor


def _by_hand(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], scales: list[float | None]) -> None:
    """Steps with the given scales; None: skipped."""
    params = list(model.parameters())
    masters = [param.detach().clone().float() for param in params]
    optimizer = make(masters)
    for seed, scale in enumerate(scales):
        if scale is None:
            continue
        model.zero_grad()
        (_loss(model, seed) * scale).backward()
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)


def test_networks_are_converted_but_not_their_batch_norms() -> None:
    model = fp16_utils.network_to_half(_model())
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], fp16_utils.tofp16)
    assert [param.dtype for param in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2 + [
        torch.float16
    ] * 2
    converted = _half()
    assert [p.dtype for p in converted.parameters()] == [p.dtype for p in model.parameters()]
    lstm = fp16_utils.convert_network(nn.LSTM(3, 2), torch.bfloat16)
    assert all(param.dtype == torch.bfloat16 for param in lstm.parameters())
    linear = nn.Linear(2, 2)
    linear.weight.grad = torch.ones(2, 2)
    fp16_utils.convert_module(linear, torch.float16)
    assert linear.weight.grad.dtype == torch.float16
    wrapped = fp16_utils.FP16Model(nn.Linear(3, 2))
    assert wrapped(torch.ones(1, 3)).dtype == torch.float16


@pytest.mark.parametrize("flat", [True, False])
def test_masters_by_hand(flat: bool) -> None:
    model = nn.Linear(4, 2).half()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    assert all(master.dtype == torch.float32 for master in masters)
    model(torch.ones(3, 4).half()).float().sum().backward()
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    for param, old in zip(params, before, strict=True):
        assert param.grad is not None
        assert torch.equal(param.detach(), (old.float() - 0.1 * param.grad.float()).half())


def test_a_flat_master_of_several_dtypes_is_refused() -> None:
    with pytest.raises(TypeError, match="mixture of parameters of different types"):
        fp16_utils.prep_param_lists(_half(), flat_master=True)


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_optimizer_trains_as_a_loop_by_hand(dynamic: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    model, twin = _half(), _half()
    optimizer = fp16_utils.FP16_Optimizer(
        make(model.parameters()),
        static_loss_scale=128.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 256.0, "scale_window": 3},
        verbose=False,
    )
    scales: list[float | None] = []
    for seed in range(8):
        optimizer.zero_grad()
        explodes = dynamic and seed == 2
        scales.append(None if explodes else optimizer.loss_scale)
        optimizer.backward(_loss(model, seed, float("inf") if explodes else 1.0))
        assert optimizer.overflow == explodes
        optimizer.step()
    assert scales == ([256.0, 256.0, None, 128.0, 128.0, 128.0, 256.0, 256.0] if dynamic else [128.0] * 8)
    _by_hand(twin, make, scales)
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=0, atol=1e-6)


def test_clipping_inspecting_and_postponing() -> None:
    model = _half()
    optimizer = fp16_utils.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=16.0, verbose=False
    )
    optimizer.backward(_loss(model, 0), update_master_grads=False)
    optimizer.backward(_loss(model, 1), update_master_grads=False)
    optimizer.update_master_grads()
    found = optimizer.inspect_master_grad_data()
    assert found is not None
    whole = torch.cat([grad.flatten() for grad in found[0]])
    expected = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    sixteenth = torch.cat(
        [
            p.grad.float().flatten() / (16 if p.dtype == torch.float16 else 1)
            for p in model.parameters()
            if p.grad is not None
        ]
    )
    torch.testing.assert_close(whole, sixteenth)
    assert expected.shape == whole.shape
    norm = optimizer.clip_master_grads(1e-3)
    torch.testing.assert_close(norm, whole.norm())
    clipped = optimizer.inspect_master_grad_data()
    assert clipped is not None
    assert float(torch.cat([grad.flatten() for grad in clipped[0]]).norm()) == pytest.approx(1e-3, rel=1e-2)
    optimizer.overflow = True
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.clip_master_grads(1.0) == -1


def test_a_closure_is_run_again_after_an_overflow() -> None:
    model = _half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fp16_utils.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    factors = iter([float("inf"), 1.0])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, 0, next(factors))
        optimizer.backward(loss)
        return loss

    before = [param.detach().clone() for param in model.parameters()]
    assert torch.isfinite(optimizer.step(closure))
    assert optimizer.loss_scale == 2.0**15
    assert not torch.equal(next(model.parameters()), before[0])


def _trained(kind: Any, steps: int) -> tuple[nn.Module, Any]:
    model = _half()
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), dynamic_loss_scale=True, verbose=False)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _train(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        optimizer.backward(_loss(model, seed))
        optimizer.step()


@pytest.mark.parametrize("kind", [fp16_utils.FP16_Optimizer, older.FP16_Optimizer])
def test_a_resumed_run_is_the_run(kind: Any) -> None:
    model, optimizer = _trained(kind, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = _trained(kind, 0)
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    _train(model, optimizer, range(3, 6))
    _train(again, resumed, range(3, 6))
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="serialized using state_dict"):
        copy.copy(fp16_utils.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False))


class _SavedScaler:
    """Has the attributes of the real ``apex.amp.scaler.LossScaler``, as a pickle of it brings them."""

    def __init__(self) -> None:
        self.dynamic, self._loss_scale, self._max_loss_scale = True, 4096.0, 2.0**24
        self._min_loss_scale, self._scale_seq_len, self._unskipped = None, 2000, 17
        self._has_overflow, self._overflow_buf = False, torch.zeros(1, dtype=torch.int32)


class _SavedOldScaler:
    """Has the attributes of ``apex.fp16_utils.DynamicLossScaler``."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 64.0, 5, -1
        self.scale_factor, self.scale_window = 2.0, 500


@pytest.mark.parametrize(
    ("scaler", "scale", "window"), [(_SavedScaler(), 4096.0, 2000), (_SavedOldScaler(), 64.0, 500)]
)
def test_a_state_of_the_real_one_loads(scaler: Any, scale: float, window: int) -> None:
    model, optimizer = _trained(fp16_utils.FP16_Optimizer, 2)
    saved = {**optimizer.state_dict(), "loss_scaler": scaler}
    saved["fp32_from_fp16"] = [[nn.Parameter(master.clone()) for master in group] for group in saved["fp32_from_fp16"]]
    again, resumed = _trained(fp16_utils.FP16_Optimizer, 0)
    resumed.load_state_dict(saved)
    assert resumed.loss_scale == scale
    assert resumed.loss_scaler._scale_seq_len == window
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        if mine.dtype == torch.float16:  # fp32 parameters come with the model
            assert torch.equal(mine, theirs)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    _, optimizer = _trained(fp16_utils.FP16_Optimizer, 0)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="no fp32_from_fp16"):
        optimizer.load_state_dict({key: value for key, value in state.items() if key != "fp32_from_fp16"})
    with pytest.raises(CheckpointError, match="masters of the shapes"):
        optimizer.load_state_dict({**state, "fp32_from_fp16": [[torch.zeros(3)]], "overflow": True})
    assert not optimizer.overflow


def test_the_first_scalers() -> None:
    scaler = fp16_utils.DynamicLossScaler(init_scale=8.0, scale_window=2)
    param = nn.Parameter(torch.ones(2))
    seen = []
    for overflow in (False, True, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [8.0, 4.0, 4.0, 8.0, 8.0]
    scaler.backward(param.sum())
    assert param.grad is not None
    assert param.grad.tolist() == [8.0, 8.0]
    assert not scaler.has_overflow([param])
    param.grad[0] = float("nan")
    assert scaler.has_overflow([param])
    assert not fp16_utils.LossScaler(4.0).has_overflow([param])
    assert fp16_utils.LossScaler(4.0).scale_gradient(None, (torch.ones(1),), None)[0].item() == 4.0
    assert fp16_utils.to_python_float(torch.tensor(2.0)) == 2.0


@pytest.mark.parametrize("make", [older.FusedAdam, older.FusedSGD, optimizers.FusedAdam])
def test_the_older_optimizers_step_as_their_formulas_say(make: Any) -> None:
    model, twin = nn.Linear(4, 2).half(), nn.Linear(4, 2).half()
    twin.load_state_dict(model.state_dict())
    inner = make(model.parameters(), lr=0.05)
    optimizer = optimizers.FP16_Optimizer(inner, static_loss_scale=128.0)
    x = torch.ones(3, 4).half()
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
    masters = [param.detach().clone().float() for param in twin.parameters()]
    reference: Any = (
        torch.optim.SGD(masters, lr=0.05)
        if make is older.FusedSGD
        else torch.optim.AdamW(masters, lr=0.05, weight_decay=0.0)
    )
    for _ in range(5):
        twin.zero_grad()
        (twin(x).float().square().mean() * 128.0).backward()
        for param, master in zip(twin.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / 128.0
        reference.step()
        with torch.no_grad():
            for param, master in zip(twin.parameters(), masters, strict=True):
                param.copy_(master)
    torch.testing.assert_close(optimizer.fp32_groups[0], masters, rtol=0, atol=1e-5)


def test_the_older_optimizer_clips_by_the_norm_and_skips_overflows() -> None:
    param = nn.Parameter(torch.ones(2).half())
    inner = optimizers.FusedAdam([param], lr=0.1, bias_correction=False, max_grad_norm=1.0)
    optimizer = optimizers.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    optimizer.backward((param.float() * torch.tensor([3.0, 4.0]) * float("inf")).sum())
    optimizer.step()
    assert optimizer.cur_scale == 2**15
    assert param.tolist() == [1.0, 1.0]
    optimizer.zero_grad()
    optimizer.backward((param.float() * torch.tensor([3.0, 4.0]) / 1024).sum())
    optimizer.step()
    assert param.tolist() != [1.0, 1.0]
    with pytest.raises(SystemError, match="dynamic loss scale args"):
        optimizers.FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args={})
    with pytest.raises(RuntimeError, match="must be wrapped with"):
        older.FusedSGD([param], lr=0.1).step()


def _two_groups(seed: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(3, 4, generator=generator).to(dtype)], [torch.randn(5, generator=generator).to(dtype)]]


def test_lamb_under_the_older_fp16_optimizer_clips_once() -> None:
    """The reference: FusedLAMB itself over fp32 parameters with the same gradients, whose norm is far above 1."""
    halves = [[nn.Parameter(p) for p in group] for group in _two_groups(0, torch.float16)]
    singles = [[nn.Parameter(p.detach().float()) for p in group] for group in halves]
    wrapped = older.FP16_Optimizer(
        optimizers.FusedLAMB([{"params": group} for group in halves], lr=0.125, max_grad_norm=1.0),
        static_loss_scale=8.0,
    )
    plain = optimizers.FusedLAMB([{"params": group} for group in singles], lr=0.125, max_grad_norm=1.0)
    for step in range(3):
        grads = [[16.0 * g for g in group] for group in _two_groups(step + 1, torch.float16)]
        for params, given, twins in zip(halves, grads, singles, strict=True):
            for param, grad, twin in zip(params, given, twins, strict=True):
                param.grad, twin.grad = grad.clone(), grad.float() / 8.0
        wrapped.step()
        plain.step()
        for masters, twins in zip(wrapped.fp32_groups, singles, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(masters, twins, strict=True)), step


def test_copies_of_the_older_fp16_optimizer() -> None:
    model = nn.Linear(3, 2).half()
    wrapped = older.FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.25), static_loss_scale=4.0)
    again = copy.deepcopy(wrapped)
    assert again.cur_scale == 4.0
    assert again.optimizer is not wrapped.optimizer
    assert again.optimizer.param_groups[0]["params"][0] is again.fp32_groups[0][0]
