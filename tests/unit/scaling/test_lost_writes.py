"""At O2 and O5 the masters overwrite what a script writes into the model's weights: it is told so once.

Covers: xamp.scaling.lost_writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.scaling.lost_writes import LostWrites, _differs, _part, warn_of_lost

Loop = tuple[nn.Module, SGD]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="xamp")
    return lambda: [text for r in caplog.records if "differs from its fp32 master" in (text := r.getMessage())]


@pytest.fixture(params=["O2", "O5"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    xamp.initialize(model, optimizer, request.param, init_scale=1024.0, verbosity=0)
    yield model, optimizer
    xamp.session(model).close()


def step(loop: Loop, times: float = 1.0, **options: Any) -> None:
    model, optimizer = loop
    optimizer.zero_grad()
    for _ in range(2):  # accumulated
        with xamp.scale_loss((model(torch.randn(8, 4)) - 1.0).square().mean() * times, optimizer) as scaled:
            scaled.backward()
    optimizer.step()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)


def clamp_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.01, 0.01)


def new_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def one_weight(model: nn.Module) -> None:
    nn.init.zeros_(model.get_submodule("0").weight)  # type: ignore[arg-type]


def test_what_is_written_after_the_model_followed_its_masters_is_told(
    loop: Loop, told: Callable[[], list[str]]
) -> None:
    model, optimizer = loop
    step(loop)
    with torch.no_grad():
        for master in xamp.master_params(optimizer):
            master.mul_(0.5)
    model(torch.randn(8, 4))  # follows the masters
    assert not told()
    clamp(model)
    step(loop)
    assert len(told()) == 1


@pytest.mark.parametrize("write", [clamp, clamp_data, new_data, one_weight])
def test_writes_after_each_step_are_told_once(
    loop: Loop, told: Callable[[], list[str]], write: Callable[[nn.Module], None]
) -> None:
    for _ in range(6):
        step(loop)
        write(loop[0])
    assert len(told()) == 1
    assert told()[0].startswith("0.weight")
    assert f"At level {xamp.session(loop[0]).policy.level} write into the masters" in told()[0]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("when", [1, 4, 9])
def test_one_write_into_one_weight_is_told_at_the_next_scale_loss(
    loop: Loop, told: Callable[[], list[str]], index: int, when: int
) -> None:
    for _ in range(when):
        step(loop)
    name, param = list(loop[0].named_parameters())[index]
    with torch.no_grad():
        param[-1] += 1.0
    assert told() == []
    with xamp.scale_loss((loop[0](torch.randn(8, 4)) - 1.0).square().mean(), loop[1]) as scaled:
        scaled.backward()
    is_lost = param.dtype != torch.float32
    assert [text.partition(" of the model")[0] for text in told()] == [name] * is_lost


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("when", [0, 1, 4])
@pytest.mark.parametrize("written", [1, 2])
def test_one_between_scale_loss_and_the_step_is_told_by_the_next_scale_loss(
    loop: Loop, told: Callable[[], list[str]], index: int, when: int, written: int
) -> None:
    model, optimizer = loop
    name, param = list(model.named_parameters())[index]

    def backward() -> None:
        with xamp.scale_loss((model(torch.randn(8, 4)) - 1.0).square().mean(), optimizer) as scaled:
            scaled.backward()

    for _ in range(when):
        step(loop)
    optimizer.zero_grad()
    for micro in range(2):
        backward()
        if micro == written - 1:
            with torch.no_grad():
                param[-1] += 1.0
    optimizer.step()
    optimizer.zero_grad()
    backward()
    is_lost = param.dtype != torch.float32
    assert [text.partition(" of the model")[0] for text in told()] == [name] * is_lost


def test_one_into_a_few_rows_of_a_large_weight_is_told_at_the_step(told: Callable[[], list[str]]) -> None:
    """A weight that was written to is compared as a whole: only one whose turn it is, by parts."""
    model = nn.Linear(100, 700)
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    with xamp.scale_loss(model(torch.randn(8, 100)).square().mean(), optimizer) as scaled:
        scaled.backward()
    with torch.no_grad():
        model.weight[0].fill_(0.5)
    optimizer.step()
    assert len(told()) == 1


def test_a_load_between_scale_loss_and_the_step_is_not_told(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, optimizer = loop
    step(loop)
    optimizer.zero_grad()
    with xamp.scale_loss((model(torch.randn(8, 4)) - 1.0).square().mean(), optimizer) as scaled:
        scaled.backward()
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    with torch.no_grad():
        next(iter(xamp.master_params(optimizer))).add_(0.5)
    optimizer.step()
    step(loop)
    assert told() == []


@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_a_write_through_data_is_told_within_a_pass_over_the_weights(
    loop: Loop, told: Callable[[], list[str]], index: int
) -> None:
    step(loop)
    name, param = list(loop[0].named_parameters())[index]
    for _ in range(2):  # a step has two scale_loss, and the model four weights with masters
        param.data.add_(1.0)
        step(loop)
    assert [text.partition(" of the model")[0] for text in told()] == [name]


def test_a_write_that_a_write_into_another_master_hides_is_told(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, optimizer = loop
    step(loop)
    one_weight(model)
    with torch.no_grad():
        list(xamp.master_params(optimizer))[-1].add_(0.5)
    model(torch.randn(8, 4))  # the model follows that one
    step(loop)
    assert [text.partition(" of the model")[0] for text in told()] == ["0.weight"]


@pytest.mark.parametrize("evaluate", [nn.Module.eval, lambda model: model(torch.randn(8, 4))])
@pytest.mark.parametrize("write", [clamp, one_weight])
def test_a_write_that_an_evaluation_undoes_is_told(
    loop: Loop, told: Callable[[], list[str]], write: Any, evaluate: Any
) -> None:
    step(loop)
    write(loop[0])
    with torch.no_grad():
        evaluate(loop[0])
    assert len(told()) == 1
    assert "the next step or evaluation overwrites the model" in told()[0]


def test_a_write_through_data_is_told_at_the_first_changes_of_the_mode(
    loop: Loop, told: Callable[[], list[str]]
) -> None:
    """As of averages that are put into the model to evaluate them."""
    model, _ = loop
    step(loop)
    for _ in range(3):
        model.eval()
        model.train()
    assert told() == []
    new_data(model)
    model.eval()
    assert len(told()) == 1
    new_data(model)
    model.train()
    assert len(told()) == 1


def test_at_later_changes_of_the_mode_nothing_is_compared(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, _ = loop
    step(loop)
    for number in range(9):
        model.train(number % 2 == 1)
    new_data(model)
    model.train()
    assert told() == []


def test_the_cure_is_one(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, optimizer = loop
    for _ in range(6):
        step(loop)
        with torch.no_grad():
            for param in xamp.master_params(optimizer):
                param.clamp_(-0.01, 0.01)
    model(torch.randn(8, 4))
    assert max(float(p.detach().abs().max()) for p in model.parameters()) <= 0.0101
    assert told() == []


def test_other_training_is_not_told(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, optimizer = loop
    clamp(model)  # before the first scale_loss: the masters follow
    average = xamp.ema(model, decay=0.9)
    for index in range(9):
        step(loop, times=float("inf") if index == 3 and xamp.session(model).policy.checks else 1.0)
        average.update()
        if index == 5:
            with average.swapped():
                model(torch.randn(8, 4))
        if index == 6:
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        if index == 7:
            xamp.load_state_dict(xamp.state_dict(model), model)
    with torch.no_grad():  # as SAM does: perturb, look again, restore
        for param in xamp.master_params(optimizer):
            param.add_(0.1)
    step(loop)
    step(loop)
    assert told() == []


def test_a_large_weight_is_compared_in_chunks() -> None:
    master = nn.Parameter(torch.zeros(3 * 2**11, 2**11))
    param = nn.Parameter(master.detach().half())
    assert not bool(_differs(param, master))
    for row in (5, -1):
        with torch.no_grad():
            param[row, 7] = 1.0
        assert bool(_differs(param, master))
        assert LostWrites().find([(param, master)], []) == [param]
        with torch.no_grad():
            param[row, 7] = 0.0


def test_of_a_large_weight_each_part_has_its_turn() -> None:
    master = nn.Parameter(torch.arange(300.0)[:, None].expand(300, 2**10).contiguous())
    param = nn.Parameter(master.detach().half())
    turns = [_part(param, master, turn) for turn in range(1, 6)]
    assert [part.shape[0] for part, _ in turns] == [64, 64, 64, 44, 64]
    assert [int(part[0, 0]) for part, _ in turns] == [64, 128, 192, 256, 20]
    assert all(torch.equal(part, exact) for part, exact in turns)
    with torch.no_grad():
        param[200] = 0.0
    lost = LostWrites()
    assert [bool(lost.find([], [(param, master)])) for _ in range(4)] == [False, False, True, False]
    one = nn.Parameter(torch.ones(()))
    assert _part(one, one, 3)[0] is one


def test_nan_that_only_one_of_them_has_is_a_difference() -> None:
    param, master = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(3))
    with torch.no_grad():
        param[1] = float("nan")
        assert bool(_differs(param, master))
        master[1] = float("nan")
        assert not bool(_differs(param, master))
        param[1] = 1.0
        assert bool(_differs(param, master))


def test_on_a_device_the_answer_comes_later() -> None:
    """The host does not wait for it: it asks again at the next look."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    master, event = nn.Parameter(torch.tensor([0.5, 1.0])), Event()
    param = nn.Parameter(torch.tensor([0.5, 1.0]).half())
    lost, pairs = LostWrites(), [(param, master)]
    lost._late = [param, param], torch.tensor([0.0, 1.0]), event  # what find() leaves on a device
    assert lost.find([], pairs) == []
    event.done = True
    assert lost.find([], pairs) == [param]
    assert lost.find([], pairs) == []


def test_eight_weights_are_compared_at_each_of_the_first_looks_and_then_at_each_eighth() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    versions = xamp.session(model).engine.states[0].master_versions
    place_of = {id(param): place for place, param in enumerate(model.parameters())}
    looks = [sorted(place_of[id(p)] for p, _ in versions.next_few()) for _ in range(48)]
    assert looks[7] == looks[31] == list(range(8))
    assert looks[8] == list(range(1, 9))
    assert looks[39] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert all(len(look) == 8 for look in looks[:32])
    assert [place for place in range(32, 48) if looks[place]] == [39, 47]
    with torch.no_grad():
        next(iter(xamp.master_params(optimizer))).add_(1.0)
    [versions.next_few() for _ in range(7)]
    assert sorted(place_of[id(p)] for p, _ in versions.next_few()) == list(range(1, 8))  # the model will follow it


def test_a_weight_that_is_nan_is_not_told(loop: Loop, told: Callable[[], list[str]]) -> None:
    model, optimizer = loop
    step(loop)
    with torch.no_grad():
        next(iter(xamp.master_params(optimizer))).fill_(float("nan"))
    for _ in range(3):
        model(torch.randn(8, 4))
        with xamp.scale_loss(model(torch.randn(8, 4)).sum(), optimizer) as scaled:
            scaled.backward()
    assert told() == []


def test_of_many_parameters_the_first_is_named_and_the_others_are_counted(told: Callable[[], list[str]]) -> None:
    for names in (["a"], ["a", "b"], ["a", "b", "c"]):
        warn_of_lost(names, "O2")
    assert [text.partition(" of the model")[0] for text in told()] == ["a", "a and 1 more", "a and 2 more"]
