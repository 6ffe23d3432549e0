"""At O2 and O5 the masters overwrite what a script writes into the model's weights: it is told so once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.scaling.weights import LostWrites, _differs, _warn_of_lost

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


def test_one_write_between_the_looks_is_told(loop: Loop, told: Callable[[], list[str]]) -> None:
    for _ in range(5):
        step(loop)
    clamp(loop[0])  # ten were before: the looks are at the ninth and the seventeenth scale_loss
    assert told() == []
    step(loop)
    assert len(told()) == 1


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


def test_a_large_weight_is_looked_at_in_part() -> None:
    master = nn.Parameter(torch.zeros(3 * 2**11, 2**11))
    param = nn.Parameter(master.detach().half())
    assert not bool(_differs(param, master))
    with torch.no_grad():
        param[5] = 1.0
    assert bool(_differs(param, master))


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
    """The host does not wait for it: it asks again at the next scale_loss."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    master, event = nn.Parameter(torch.tensor([0.5, 1.0])), Event()
    param = nn.Parameter(torch.tensor([0.5, 2.0]).half())
    lost, pairs = LostWrites(), [(param, master)]

    def is_due() -> bool:
        lost.count(pairs)
        return lost.is_due

    assert is_due()
    lost._late = [param], torch.tensor([1.0]), event  # what find() leaves on a device
    assert lost.find(pairs) == []
    assert is_due()
    assert is_due()
    event.done = True
    assert lost.find(pairs) == [param]
    assert bool(_differs(param, master))
    assert not bool(_differs(nn.Parameter(torch.tensor([0.5, 1.0]).half()), master))
    assert not any(is_due() for _ in range(40))


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
        _warn_of_lost(names, "O2")
    assert [text.partition(" of the model")[0] for text in told()] == ["a", "a and 1 more", "a and 2 more"]
