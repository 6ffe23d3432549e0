"""How much memory a step of Apex's optimizers takes, counted by storages; and the same steps, whatever the pieces.

Covers: xamp.apex.optimizers, xamp.apex._multi_tensor_steps, xamp.updates.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from apex_oracles import ORACLES, make_case, trained
from torch import nn

from xamp import updates
from xamp.apex import _multi_tensor, amp, optimizers
from xamp.apex.optimizers._older import FusedAdam as OlderAdam
from xamp.testing.measure import Storages

Make = Callable[[Any], Any]
PIECE = 2**18 * 4
"""Bytes of a temporary in fp32. All that is stepped here has eight times as many elements."""
SHAPES = {"many": [(128, 256)] * 64, "one": [(2048, 1024)]}
HALF = torch.float16

CASES: dict[str, tuple[Make, float, float, int, int]] = {
    # What each holds between steps, in bytes a parameter of 32 and of 16 bits, and its temporaries for either.
    "FusedAdam": (lambda p: optimizers.FusedAdam(p, weight_decay=0.1), 16, 12, 1, 3),
    "FusedAdam L2": (lambda p: optimizers.FusedAdam(p, weight_decay=0.1, adam_w_mode=False), 16, 12, 1, 3),
    "capturable": (lambda p: optimizers.FusedAdam(p, weight_decay=0.1, capturable=True), 16, 12, 2, 4),
    "master_weights": (lambda p: optimizers.FusedAdam(p, capturable=True, master_weights=True), 20, 16, 2, 3),
    "max_grad_norm": (lambda p: optimizers.FusedAdam(p, max_grad_norm=1.0), 16, 12, 2, 4),
    "FusedSGD": (lambda p: optimizers.FusedSGD(p, lr=0.1), 8, 4, 0, 2),
    "momentum": (lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9), 12, 6, 0, 3),
    "no master grads": (
        lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, materialize_master_grads=False),
        *(12, 6, 0, 3),
    ),
    "Nesterov": (lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), 12, 6, 2, 5),
    "FusedLAMB": (lambda p: optimizers.FusedLAMB(p), 16, 8, 7, 8),
    "MixedPrecisionLamb": (
        lambda p: optimizers.FusedMixedPrecisionLamb(p, reduced_precision_dtype=HALF),
        *(16, 16, 7, 8),
    ),
    "FusedNovoGrad": (lambda p: optimizers.FusedNovoGrad(p, weight_decay=0.1), 12, 6, 1, 4),
    "in the moment": (lambda p: optimizers.FusedNovoGrad(p, reg_inside_moment=True), 12, 6, 2, 5),
    "FusedAdagrad": (lambda p: optimizers.FusedAdagrad(p, weight_decay=0.1), 12, 6, 2, 5),
    "before 2019": (lambda p: OlderAdam(p, weight_decay=0.1), 16, 8, 4, 4),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_a_few_pieces_more_than_its_states(name: str, dtype: torch.dtype, shapes: str) -> None:
    make, full, half, temporaries, of_half = CASES[name]
    params = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES[shapes]]
    optimizer = make(params)
    count = sum(param.numel() for param in params)
    peak = _peak(optimizer, params)
    states, most = (full, temporaries) if dtype == torch.float32 else (half, of_half)
    assert states * count <= peak <= states * count + most * PIECE + 2**13  # and numbers such as norms


def _peak(optimizer: Any, params: list[nn.Parameter]) -> int:
    """The bytes of parameters, gradients and all else at the peak of the second step."""
    gc.collect()
    masters = [m for group in getattr(optimizer, "param_groups_master", ()) for m in group["params"] if m is not None]
    with Storages("cpu") as storages:
        storages.note([*params, *masters])
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            storages.lap()
            optimizer.step()
            peak: int = storages.lap()
    return peak


APEX_O2 = {
    "FusedAdam": 20,
    "FusedLAMB": 20,
    "FusedAdagrad": 16,
    "FusedNovoGrad": 16,
    "momentum": 16,
    "no master grads": 12,
}
"""With Apex's own: 2 for weights, 2 for their gradients, 4 for masters, 4 for theirs, and the states."""


@pytest.mark.parametrize("name", APEX_O2)
def test_o2_takes_what_it_takes_with_apex(name: str) -> None:
    model: Any = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(32)))
    model, optimizer = amp.initialize(model, CASES[name][0](model.parameters()), opt_level="O2", verbosity=0)
    count = sum(param.numel() for param in model.parameters())
    x, peaks = torch.ones(1, 256), []
    with Storages("cpu") as storages:
        storages.note([*model.parameters(), *amp.master_params(optimizer)])
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
                scaled.backward()
            storages.lap()
            optimizer.step()
            peaks.append(storages.lap())
    _, _, _, full, half = CASES[name]
    temporaries = half if name == "no master grads" else full  # of gradients on the model, or of masters
    assert APEX_O2[name] * count <= peaks[1] <= APEX_O2[name] * count + temporaries * PIECE + 2**16


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16])
def test_pieces_change_no_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (7, 0, 40_000, 300, 300)]
        params.append(nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator).to(dtype)))
        params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
        optimizer = CASES[name][0](params)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            optimizer.step()
        return [t for p in params for t in (p.detach(), *optimizer.state[p].values()) if isinstance(t, torch.Tensor)]

    whole = steps()
    # Norms on a CPU are summed in chunks of 2**14 elements, and torch's kernels take some elements at once: others
    # would be rounded differently.
    monkeypatch.setattr(_multi_tensor, "PIECE_ON_HOST", 2**14 if "LAMB" in name.upper() else 128)
    torch.testing.assert_close(steps(), whole, rtol=0, atol=0, equal_nan=True)


FUSED: list[tuple[str, dict[str, Any]]] = [
    ("FusedAdam", {"weight_decay": 0.1}),
    ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.1}),
    ("FusedAdam", {"bias_correction": False}),
    ("FusedAdam", {"capturable": True, "weight_decay": 0.1, "lr": 3e-3}),
    ("FusedAdam", {"capturable": True, "master_weights": True}),
    ("FusedSGD", {"lr": 2e-4}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "dampening": 0.3}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's fused kernels, which a CPU has too, as on a card."""
    monkeypatch.setattr(updates, "HOST", "no device")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_kernels_take_the_steps_of_a_loop_in_fp64(name: str, options: dict[str, Any]) -> None:
    params, steps = make_case()
    with _Names() as names:
        found = trained(lambda own: getattr(optimizers, name)(own, **options), params, steps)
    assert any("_fused_" in called for called in names.seen) == ("wd_after_momentum" not in options)
    torch.testing.assert_close(found, ORACLES[name](params, steps, **options), rtol=0, atol=1e-6)


class _Names(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fused")
def test_a_fused_kernel_steps_everything_at_once_in_fp32() -> None:
    for name in ("FusedAdam", "capturable", "momentum", "Nesterov"):
        params = [nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES["many"]]
        with _Names() as names:
            peak = _peak(CASES[name][0](params), params)
        assert peak <= CASES[name][1] * sum(param.numel() for param in params) + 2**13, name
        assert sum("_fused_" in called for called in names.seen) == 2, name  # steps, each with one kernel


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("master_weights", [False, True])
def test_a_fused_step_on_the_scale_of_a_grad_scaler_skips_an_overflow(master_weights: bool, dtype: torch.dtype) -> None:
    param, twin = nn.Parameter(torch.ones(40, dtype=dtype)), nn.Parameter(torch.ones(40))
    optimizer = optimizers.FusedAdam([param], lr=0.125, capturable=True, master_weights=master_weights)
    reference = torch.optim.AdamW([twin], lr=0.125, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    for number in range(4):
        before = [param.detach().clone(), *(t.clone() for t in optimizer.state[param].values())]
        grad = torch.full((40,), 256.0 * (number + 1), dtype=dtype)
        if number == 2:
            grad[3] = float("inf")
        param.grad = grad.clone()
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer)
        scaler.update(256.0)
        if number == 2:
            assert torch.equal(param.grad, grad)
            after = [param.detach(), *optimizer.state[param].values()]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            continue
        assert torch.equal(param.grad, grad / 256)
        twin.grad = grad.float() / 256
        reference.step()
    error = 1e-6 if dtype == torch.float32 else 2**-9
    torch.testing.assert_close(param.detach().float(), twin.detach(), rtol=0, atol=error)


@pytest.mark.usefixtures("fused")
def test_fused_kernels_are_left_where_strides_differ() -> None:
    values, grad = torch.randn(4, 6), torch.randn(6, 4).t()
    for apart in (values.clone(), torch.randn(4, 12)[:, ::2].copy_(values)):
        param, twin = nn.Parameter(apart), nn.Parameter(values.clone())
        optimizer, reference = optimizers.FusedAdam([param]), torch.optim.AdamW([twin], weight_decay=0.0)
        for _ in range(3):
            param.grad, twin.grad = grad, grad.contiguous()
            optimizer.step()
            reference.step()
        assert torch.equal(param.detach(), twin.detach())
