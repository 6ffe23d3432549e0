"""Parameters, gradients and state of other strides than each other's: fused kernels would take them for alike.

Covers: xamp.scaling.fused, xamp.scaling.masters.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp

LEVELS = ("O1", "O2", "O5")
ROUGH = {"O1": 2e-3, "O2": 2e-3, "O5": 2e-2}
"""Of weights of about 0.2 that move by 0.1: what half precision and bfloat16 round in six steps."""
MAKERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "SGD, no momentum": lambda params: torch.optim.SGD(params, lr=0.05),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-3),
}
LAST = torch.channels_last
Layout = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _strides(lane: Lane) -> None:
    try:
        torch.zeros(1, 2, 2, 2, device=lane.device).contiguous(memory_format=LAST)
    except RuntimeError as error:
        pytest.skip(f"{lane} has contiguous tensors only: {error}")


def convolution() -> Any:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3)


def images(lane: Lane) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(lane.device)


def manage(model: Any, name: str, level: str | None, lane: Lane) -> tuple[Any, Any]:
    model = model.to(lane.device)
    optimizer = MAKERS[name](model.parameters())
    if level is not None:
        xamp.initialize(model, optimizer, level, verbosity=0, init_scale=64.0)
    return model, optimizer


def steps(model: Any, optimizer: Any, x: torch.Tensor, count: int = 3, laid_out: Layout | None = None) -> None:
    """Train; gradients that are ``laid_out`` by it are put into ``.grad``."""
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if xamp_manages(optimizer):
            with xamp.scale_loss(loss, optimizer) as scaled:
                backward(model, scaled, laid_out)
        else:
            backward(model, loss, laid_out)
        optimizer.step()


def xamp_manages(optimizer: Any) -> bool:
    return hasattr(optimizer, "_xamp")


def backward(model: Any, loss: torch.Tensor, laid_out: Layout | None) -> None:
    if laid_out is None:
        loss.backward()
        return
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = laid_out(grad) if grad.dim() == 4 else grad


def channels_last(grad: torch.Tensor) -> torch.Tensor:
    return grad.contiguous(memory_format=LAST)


def a_part(grad: torch.Tensor) -> torch.Tensor:
    """The same numbers as one channel of three."""
    return grad.new_zeros(grad.shape[0], 3, *grad.shape[2:])[:, :1].copy_(grad)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([value.detach().float().flatten() for value in model.state_dict().values()])


def assert_trains_alike(run: Any, level: str) -> None:
    torch.testing.assert_close(run(level), run(None), rtol=0, atol=ROUGH[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("formats", [(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)])
def test_a_memory_format_that_changes_after_some_steps(lane: Lane, level: str, name: str, formats: Any) -> None:
    def run(level: str | None) -> torch.Tensor:
        model, optimizer = manage(convolution().to(memory_format=formats[0]), name, level, lane)
        steps(model, optimizer, images(lane))
        model.to(memory_format=formats[1])
        steps(model, optimizer, images(lane))
        return weights(model)

    assert_trains_alike(run, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("formats", [(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_checkpoint_of_another_memory_format(
    lane: Lane, level: str, name: str, formats: Any, steps_before: int
) -> None:
    """Also where the run that loads it has trained, so that its state was seen to fit."""

    def run(level: str | None) -> torch.Tensor:
        model, optimizer = manage(convolution().to(memory_format=formats[0]), name, level, lane)
        steps(model, optimizer, images(lane))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        model, optimizer = manage(convolution().to(memory_format=formats[1]), name, level, lane)
        steps(model, optimizer, images(lane), count=steps_before)
        for each, state in zip((model, optimizer), torch.load(io.BytesIO(file.getvalue())), strict=True):
            each.load_state_dict(state)
        steps(model, optimizer, images(lane))
        return weights(model)

    assert_trains_alike(run, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_that_a_script_puts_in(lane: Lane, level: str, name: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model, optimizer = manage(convolution(), name, level, lane)
        steps(model, optimizer, images(lane))
        steps(model, optimizer, images(lane), laid_out=channels_last)
        return weights(model)

    assert_trains_alike(run, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("laid_out", [None, a_part])
def test_a_parameter_that_is_a_part_of_another_tensor(
    lane: Lane, level: str, name: str, laid_out: Layout | None
) -> None:
    """A convolution for gray images that takes one channel of a trained one; nothing else of that may move.

    Also where its gradient is such a part, and so has the strides of the parameter.
    """

    def run(level: str | None) -> torch.Tensor:
        whole = convolution().weight.detach().to(lane.device)
        others = whole[:, 1:].clone()
        model = nn.Conv2d(1, 4, 3).to(lane.device)
        model.weight = nn.Parameter(whole[:, :1])
        nn.init.zeros_(model.bias)  # type: ignore[arg-type]
        model, optimizer = manage(model, name, level, lane)
        steps(model, optimizer, images(lane)[:, :1], count=6, laid_out=laid_out)
        assert torch.equal(whole[:, 1:], others)
        return weights(model)

    assert_trains_alike(run, level)


@pytest.mark.parametrize("level", LEVELS)
def test_one_layout_stays_fused(lane: Lane, level: str) -> None:
    """Also ``channels_last``, where all of a parameter has it."""
    fused: list[bool] = []
    model, optimizer = manage(convolution().to(memory_format=LAST), "SGD", level, lane)
    if not optimizer.param_groups[0]["fused"]:
        pytest.skip(f"{lane} has no fused SGD that is right")
    optimizer.register_step_pre_hook(lambda *_: fused.append(optimizer.param_groups[0]["fused"] is True))
    steps(model, optimizer, images(lane), count=4)
    assert fused == [False, True, True, True]
