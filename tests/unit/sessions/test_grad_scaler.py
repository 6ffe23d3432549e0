"""GradScaler beside torch's: the same training gives the same scales, weights and states, bit for bit.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from scaler_comparison import FORMS, beside_torch, data, needs_torchs, net, note, scales, spoil
from torch import nn
from torch.optim import SGD, Adam

import xamp

INF, NAN = float("inf"), float("nan")
OVERFLOWS = {3: INF, 4: -INF, 17: NAN, 18: INF, 19: INF, 40: NAN, 61: INF}
"""Iteration -> what one gradient becomes in it. The first is clean: torch's fused SGD needs one to make its buffers."""


def plain(scaler: Any, loss: torch.Tensor, _: nn.Module) -> None:
    scaler.scale(loss).backward()


def in_thirds(scaler: Any, loss: torch.Tensor, _: nn.Module) -> None:
    scaler.scale(loss / 3).backward()


def with_a_penalty(scaler: Any, loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    norm = torch.stack([(g * inverse).square().sum() for g in scaled]).sum().sqrt()
    scaler.scale(loss + 0.1 * norm).backward()
    return norm.detach()


def through_a_kept_graph(scaler: Any, loss: torch.Tensor, _: nn.Module) -> None:
    scaled = scaler.scale(loss)
    with torch.autograd.graph.save_on_cpu():
        scaled.backward(retain_graph=True)
    scaled.backward()


CLIPS: dict[str, Any] = {
    "clip": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "clip values": lambda params: nn.utils.clip_grad_value_(params, 0.5),
}


def beside(
    lane: Lane | None, form: str, way: str, backward: Any = plain, count: int = 64, every: int = 1, **options: Any
) -> list[float]:
    """Train under both scalers, a step after ``every`` backwards; the scales after each iteration."""
    device = torch.device("cpu") if lane is None else lane.device
    spoilt = {10: INF, 32: INF} if every > 1 else OVERFLOWS  # 10: in a micro-batch that is not the last

    def run(scaler: Any) -> Any:
        model = net(device=device)
        optimizer = FORMS[form](model.parameters())
        seen = []
        for index in range(count):
            told = backward(scaler, model(data(index, device)).square().mean(), model)
            norm = returned = None
            if index in spoilt:
                spoil(model.parameters(), spoilt[index], lane)
            if index % every == every - 1:
                if way != "step":
                    scaler.unscale_(optimizer)
                norm = CLIPS[way](model.parameters()) if way in CLIPS else None
                returned = scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=backward is not through_a_kept_graph)
            # Where a flag tells of an overflow torch leaves the gradients scaled then, and they are finite.
            skipped = index in spoilt and lane is not None and lane.can.overflow == "flag"
            finite = None if norm is None or skipped or not bool(norm.isfinite()) else norm
            seen.append((told, returned, finite, note(scaler, model)))
        return [*seen, (None, None, None, note(scaler, optimizer))]

    return scales([record[3] for record in beside_torch(run, lane, **options)])


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *((form, "clip") for form in FORMS),
        *((f"SGD{kind}", "step") for kind in ("", "-momentum-fused")),
        ("Adam-fused", "step"),
        ("Adam-fused", "unscale"),
    ],
)
def test_sixty_iterations_with_overflows(form: str, way: str, lane: Lane) -> None:
    needs_torchs(form, lane)
    found = beside(lane, form, way, init_scale=2.0**10, growth_interval=5)
    assert found[2:5] == [1024.0, 512.0, 256.0]
    assert max(found) == 2.0**14, "four growths by iteration 60"


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_no_powers_of_two(form: str) -> None:
    """By itself torch's fused step divides by the scale instead: other last bits."""
    told: Any = {"init_scale": 3000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
    assert len(set(beside(None, form, "unscale", count=40, **told))) > 10


@pytest.mark.parametrize(
    ("form", "way", "backward"),
    [
        ("SGD-momentum-foreach", "clip", in_thirds),
        ("Adam-fused", "clip", in_thirds),
        ("SGD-momentum-foreach", "clip values", with_a_penalty),
        ("SGD", "step", through_a_kept_graph),
    ],
)
def test_backwards_of_other_kinds(form: str, way: str, backward: Any, lane: Lane) -> None:
    needs_torchs(form, lane)
    beside(lane, form, way, backward, 60, 3 if backward is in_thirds else 1, init_scale=2.0**12, growth_interval=4)


def test_two_models_and_two_optimizers_with_shared_losses(lane: Lane) -> None:
    """Each optimizer skips for itself; both move the one scale."""
    needs_values(lane)

    def run(scaler: Any) -> Any:
        models = [net(device=lane.device), net(device=lane.device)]
        optimizers = [Adam(models[0].parameters(), lr=0.01), SGD(models[1].parameters(), lr=0.01, momentum=0.9)]
        seen = []
        for index in range(60):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = (m(data(index, lane.device)) for m in models)
            losses = [(2 * first + 3 * second).square().mean(), (3 * first - 5 * second).square().mean()]
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if index in OVERFLOWS:
                spoil(models[index % 2].parameters(), OVERFLOWS[index])
            scaler.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            seen.append(note(scaler, *models))
        return [*seen, note(scaler, *optimizers)]

    records = beside_torch(run, lane, init_scale=2.0**12, growth_interval=4)
    skipped = [i for i in range(1, 60) if torch.equal(records[i][3][0][0], records[i - 1][3][0][0])]
    assert skipped == [4, 18, 40], "the first model stands still where it overflowed, and only there"


def test_update_sets_the_scale_and_the_count_of_clean_updates_goes_on(lane: Lane) -> None:
    def run(scaler: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(3, device=lane.device))
        optimizer = SGD([weight], lr=0.125)
        seen = []
        given = [None, None, 2.0**20, torch.tensor(3.0, device=lane.device), None, torch.tensor(640.0), None, None]
        for value in given:
            optimizer.zero_grad()
            scaler.scale((weight * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update(value.to(lane.device) if isinstance(value, torch.Tensor) else value)
            seen.append((note(scaler, optimizer), weight.detach().clone()))
        return seen

    records = beside_torch(run, lane, init_scale=16.0, growth_interval=3)
    assert scales([r[0] for r in records]) == [16.0, 16.0, 2.0**20, 3.0, 6.0, 640.0, 640.0, 640.0]


def test_what_is_scaled_keeps_its_form(lane: Lane) -> None:
    def run(scaler: Any) -> Any:
        t = [torch.full((2,), float(i), device=lane.device) for i in range(4)]
        nested = scaler.scale([t[0], (t[1], [t[2], ()])])
        lazy = scaler.scale(iter([t[3], [t[0]]]))
        assert not isinstance(lazy, (list, tuple)), "an iterator stays one"
        of_a_dict = list(scaler.scale({"a": t[0]}.values()))
        return nested, list(lazy), of_a_dict, scaler.scale([]), scaler.scale(()), scaler.get_scale()

    found = beside_torch(run, lane, init_scale=4.0)
    assert [type(x) for x in found[0]] == [torch.Tensor, tuple]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_the_dtype_of_what_is_scaled(dtype: torch.dtype, shape: tuple[int, ...], lane: Lane) -> None:
    if dtype is torch.float64 and lane.device.type == "mps":
        pytest.skip("no such dtype there")
    beside_torch(lambda scaler: scaler.scale(torch.ones(shape, dtype=dtype, device=lane.device)), lane, init_scale=8.0)


def test_the_gradient_of_a_scaled_tensor_is_the_scale(lane: Lane) -> None:
    outputs = [torch.ones(2, device=lane.device, requires_grad=True) for _ in range(2)]
    first, second = xamp.GradScaler(init_scale=32.0).scale(tuple(outputs))
    (first.sum() + second.sum()).backward()
    for output in outputs:
        assert output.grad is not None
        assert output.grad.tolist() == [32.0, 32.0]
