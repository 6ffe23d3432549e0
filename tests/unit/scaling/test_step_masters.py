"""Where the gradients are in fp32 masters: what people do to the model's own parameters is right or refused.

Covers: xamp.scaling.masters, xamp.scaling.moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import Dot, assert_follows, inputs, outcome, plain_iterate, run_backward, twin
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.errors import StateError, UnsupportedPolicy
from xamp.scaling import moves

with_masters = pytest.mark.parametrize("level", ["O2", "O5"])


def start(lane: Lane, level: str, **options: Any) -> tuple[Any, Any, Dot]:
    model = Dot().to(lane.device)
    reference = twin(model)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=64.0, **options)
    return model, optimizer, reference


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def divide(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.div_(2)


@with_masters
@pytest.mark.parametrize("change", [clip, divide])
def test_changing_the_models_own_gradients_is_refused(
    lane: Lane, level: str, change: Callable[[nn.Module], None]
) -> None:
    """They are zeros there, and the real ones would be stepped unclipped."""
    model, optimizer, _ = start(lane, level)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    change(model)
    with pytest.raises(StateError, match=r"gradients of the model's own parameters were written to.*clip_grad_norm_"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


class Parts(nn.Module):
    """Two layers, so that one of them is a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(7, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu()).square().mean()  # type: ignore[no-any-return]


def clear_one_by_one(part: nn.Module) -> None:
    for param in part.parameters():
        param.grad = None


@with_masters
@pytest.mark.parametrize("part", ["body", "head"])
@pytest.mark.parametrize("clear", [nn.Module.zero_grad, clear_one_by_one])
def test_clearing_a_part_of_the_model_is_refused(lane: Lane, level: str, part: str, clear: Any) -> None:
    """As DINO does with its last layer: in the masters it would have no effect, or clear all of them."""
    model = Parts().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=64.0)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    clear(model.get_submodule(part))
    for _ in range(2):
        with pytest.raises(StateError, match=r"optimizer\.step\(\): since scale_loss the gradients of a part"):
            optimizer.step()
    with pytest.raises(StateError, match=r"scale_loss: since scale_loss the gradients of a part"):
        run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.zero_grad()
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@with_masters
@pytest.mark.parametrize("part", ["body", "head"])
def test_clearing_a_part_inside_of_the_block_clears_that_part(lane: Lane, level: str, part: str) -> None:
    model = Parts().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=64.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x in inputs(3, lane):
        optimizer.zero_grad()
        with xamp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
            model.get_submodule(part).zero_grad()
        optimizer.step()
    stays = {name: torch.equal(p, before[name]) for name, p in model.named_parameters()}
    assert stays == {name: name.startswith(part) for name in before}


@with_masters
def test_clearing_one_of_two_models_leaves_the_others_gradients(lane: Lane, level: str) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    references = [twin(model) for model in models]
    optimizer = SGD([p for model in models for p in model.parameters()], lr=0.125)
    xamp.initialize(models, optimizer, level, verbosity=0, init_scale=64.0)
    x = inputs(1, lane)[0]
    run_backward(models[0](x) + models[1](x), optimizer)
    models[1].zero_grad()
    optimizer.step()
    plain_iterate(references[0], SGD(references[0].parameters(), lr=0.125), x)
    masters = optimizer.param_groups[0]["params"]
    expected = [*references[0].parameters(), *references[1].parameters()]
    for master, plain in zip(masters, expected, strict=True):
        torch.testing.assert_close(master.detach(), plain.detach())


class Around(Optimizer):
    """An optimizer that steps another one with groups of its own."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        held = list(params)
        super().__init__(held, {"lr": 0.1})
        self.inner = SGD(held, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


@with_masters
def test_an_optimizer_around_another_with_groups_of_its_own_is_refused(lane: Lane, level: str) -> None:
    """It would step low-precision parameters that have no gradients: nothing would ever move."""
    model = Dot().to(lane.device)
    optimizer = Around(model.parameters())
    with pytest.raises(UnsupportedPolicy, match=r"Around\.inner is another optimizer.*O0, O1, O3, O4"):
        xamp.initialize(model, optimizer, level, verbosity=0)
    assert type(optimizer) is Around
    assert model.a.dtype == torch.float32


def test_such_an_optimizer_trains_where_there_are_no_masters(lane: Lane) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    optimizer = Around(model.parameters())
    xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=64.0)
    x = inputs(1, lane)[0]
    run_backward(model(x), optimizer)
    optimizer.step()
    plain_iterate(reference, SGD(reference.parameters(), lr=0.1), x)
    assert_follows(optimizer, reference)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closing_with_gradients_still_scaled_is_refused(lane: Lane, level: str) -> None:
    model, optimizer, _ = start(lane, level)
    x = inputs(1, lane)[0]
    with xamp.scale_loss(model(x), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(StateError, match=r"session\.close\(\): the gradients are still scaled"):
        xamp.session(model).close()
    run_backward(model(x), optimizer)
    xamp.session(model).close()
    torch.testing.assert_close(model.a.grad, 2 * x[:4])


@with_masters
def test_a_group_cannot_be_added_twice(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    optimizer = SGD([model.a], lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0)
    optimizer.add_param_group({"params": [model.b]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.b]})


@with_masters
@pytest.mark.parametrize("steps_before", [0, 1])
def test_what_is_written_into_the_state_dict_is_what_trains_on(lane: Lane, level: str, steps_before: int) -> None:
    """A broadcast of ``model.state_dict()`` writes into the masters that it holds."""
    model, optimizer, reference = start(lane, level)
    for x in inputs(steps_before, lane):
        optimizer.zero_grad()
        run_backward(model(x), optimizer)
        optimizer.step()
    for value in model.state_dict().values():
        value.fill_(0.5)
    x = inputs(1, lane)[0]
    optimizer.zero_grad()
    run_backward(model(x), optimizer)
    optimizer.step()
    with torch.no_grad():
        for param in reference.parameters():
            param.fill_(0.5)
    plain_iterate(reference, SGD(reference.parameters(), lr=0.125), x)
    assert_follows(optimizer, reference)


@with_masters
def test_parameters_written_after_a_load_and_before_training_are_what_trains_on(lane: Lane, level: str) -> None:
    model, optimizer, reference = start(lane, level)
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        model.a.fill_(0.25)
        reference.a.fill_(0.25)
    x = inputs(1, lane)[0]
    run_backward(model(x), optimizer)
    optimizer.step()
    plain_iterate(reference, SGD(reference.parameters(), lr=0.125), x)
    assert_follows(optimizer, reference)


def test_small_gradients_move_at_once_and_large_ones_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    move = moves._transfer_chunk

    def counted(chunk: Any, *rest: Any, **options: Any) -> None:
        moved.append(len(chunk))
        move(chunk, *rest, **options)

    monkeypatch.setattr(moves, "_transfer_chunk", counted)
    for width in (8, 128):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(48)))
        optimizer = SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, "O2", init_scale=64.0, verbosity=0)
        with xamp.scale_loss(model(torch.ones(1, width)).sum(), optimizer) as scaled:
            scaled.backward()
    assert moved == [48] + [3] * 16


def write(params: Iterable[torch.Tensor], value: float) -> None:
    with torch.no_grad():
        for param in params:
            param.fill_(value)


def weights(model: nn.Module) -> set[float]:
    """The values in a state dict."""
    return {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}


def forward(model: Any) -> None:
    model(torch.ones(7, device=model.a.device))


def fails_to_load(model: Any) -> None:
    """Load a state, of which the last write into the model fails once."""

    class Full(TorchDispatchMode):
        left = 1

        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].data_ptr() == model.b.data_ptr() and self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("put in by a test")
            return func(*args, **(kwargs or {}))

    state = xamp.state_dict(model)
    with pytest.raises(torch.OutOfMemoryError), Full():  # type: ignore[no-untyped-call]
        xamp.load_state_dict(state, model)


@with_masters
@pytest.mark.parametrize("between", [weights, forward, fails_to_load])
def test_before_training_what_was_written_last_is_what_is_saved(
    lane: Lane, level: str, between: Callable[[Any], Any]
) -> None:
    """Into the model's parameters or into the masters."""
    model, optimizer, _ = start(lane, level)
    write(xamp.master_params(optimizer), 0.5)
    assert weights(model) == {0.5}
    write(model.parameters(), 0.25)
    between(model)
    assert weights(model) == {0.25}
    write(model.parameters(), 0.125)
    between(model)
    assert weights(model) == {0.125}
    write(xamp.master_params(optimizer), 0.75)
    between(model)
    write(model.parameters(), 0.375)
    assert weights(model) == {0.375}
    between(model)
    xamp.session(model).close()
    assert weights(model) == {0.375}


@with_masters
def test_what_is_written_into_a_new_master_is_the_weight(lane: Lane, level: str) -> None:
    """Into the optimizer's own, as what ``add_param_group`` and a script's loops see; nothing was read before."""
    model, optimizer, _ = start(lane, level)
    write(optimizer.param_groups[0]["params"], 0.5)
    assert weights(model) == {0.5}


@with_masters
def test_once_training_has_begun_the_masters_are_what_is_saved(lane: Lane, level: str) -> None:
    """What is written into parameters then is lost, wherever the state is asked for between."""
    model, optimizer, reference = start(lane, level)
    x = inputs(1, lane)[0]
    loss = model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_backward(loss, optimizer)
    write(model.parameters(), 0.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.step()
    plain_iterate(reference, SGD(reference.parameters(), lr=0.125), x)
    assert_follows(optimizer, reference)


@with_masters
def test_gradients_that_a_script_puts_into_cleared_masters_are_stepped(lane: Lane, level: str) -> None:
    model, optimizer, reference = start(lane, level)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    model.zero_grad()
    held = optimizer.param_groups[0]["params"]
    for master in held:
        assert master.grad is None
        master.grad = torch.ones_like(master)
    optimizer.step()
    for master, plain in zip(held, reference.parameters(), strict=True):
        assert torch.equal(master, plain - 0.125)


@with_masters
def test_a_copy_that_a_wrapper_puts_in_place_of_the_zeros_is_watched_too(level: str) -> None:
    """As DDP does with ``gradient_as_bucket_view``: a view of a bucket stands where the zeros were."""
    model = nn.Linear(4, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0)
    with xamp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    weight: Any = model.weight
    weight.grad = torch.zeros(10, dtype=weight.dtype)[:8].view(2, 4)
    assert len(list(xamp.master_params(optimizer))) == 1  # looks, and takes the copy for the zeros
    weight.grad.add_(1.0)
    with pytest.raises(StateError, match="gradients of the model's own parameters were written to"):
        optimizer.step()
