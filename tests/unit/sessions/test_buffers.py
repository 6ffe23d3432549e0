"""Floating buffers where parameters are cast: exact where nothing wrote to them, named where digits are lost.

Covers: xamp.sessions.lowering, xamp.sessions.set_up, xamp.scaling.masters.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import StateError

LEVELS = ["O2", "O3", "O5"]
X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Rotary(nn.Module):
    """A table of frequencies, as of rotary embeddings, and the cosines of a position."""

    inverse: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, 8, dtype=torch.float32) / 8)
        self.register_buffer("inverse", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.outer(positions.float(), self.inverse.float()).cos()


class Net(nn.Module):
    mean: torch.Tensor
    count: torch.Tensor
    written: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.tensor([123.675, 116.28, 103.53]))
        self.register_buffer("written", torch.tensor([0.1, 0.2]))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.written.fill_(0.3)
        y: torch.Tensor = self.layer(x - self.mean.mean())
        return y


def start(level: str, **options: object) -> tuple[Net, SGD]:
    torch.manual_seed(1)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, **{"verbosity": 0, **options})  # type: ignore[call-overload]
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_what_nothing_wrote_to_comes_back_exact(level: str) -> None:
    model, _ = start(level)
    lower = xamp.session(model).policy.dtype
    model(X)
    plain = Net()
    for state in (model.state_dict(), copy.deepcopy(model.state_dict())):
        assert torch.equal(state["mean"], plain.mean)
        assert torch.equal(state["written"], torch.tensor([0.3, 0.3], dtype=lower).float())
    assert model.mean.dtype is lower
    loaded = {**model.state_dict(), "mean": torch.tensor([0.123456789, 1.1, 2.2])}
    model.load_state_dict(loaded)
    assert torch.equal(model.state_dict()["mean"], loaded["mean"])
    assert torch.equal(model.mean, loaded["mean"].to(lower))
    xamp.session(model).close()
    assert torch.equal(model.mean, loaded["mean"])
    assert torch.equal(model.rotary.inverse, plain.rotary.inverse)
    assert torch.equal(model.written, torch.tensor([0.3, 0.3], dtype=lower).float())


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_through_data_is_not_lost(level: str) -> None:
    model, _ = start(level)
    model.mean.data.mul_(0.5)
    found = model.mean.float()
    assert torch.equal(model.state_dict()["mean"], found)
    xamp.session(model).close()
    assert torch.equal(model.mean, found)


@pytest.mark.parametrize("level", LEVELS)
def test_a_load_leaves_what_is_not_persistent(level: str) -> None:
    model, _ = start(level)
    model.load_state_dict({**model.state_dict(), "rotary.inverse": torch.ones(8)}, strict=False)
    xamp.session(model).close()
    assert torch.equal(model.rotary.inverse, Rotary().inverse)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", [False, True])
def test_inference_mode(level: str, half: bool) -> None:
    model = Net()
    if half and level != "O3":
        model.to(torch.float16 if level == "O2" else torch.bfloat16)
    with torch.inference_mode():
        xamp.initialize(model, level=level, verbosity=0)
        assert model(X).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_dict_is_no_way_into_the_exact_values(level: str) -> None:
    """A copy that was written into and is gone is told of; the values stay."""
    model, _ = start(level)
    model.state_dict()["mean"].zero_()
    with pytest.raises(StateError, match=r"state_dict\(\)\['mean'\].*The copy is gone"):
        model.state_dict()
    assert torch.equal(model.state_dict()["mean"], Net().mean)


@pytest.mark.parametrize("level", LEVELS)
def test_a_count_goes_on_beyond_what_the_lower_dtype_holds(level: str) -> None:
    model, _ = start(level)
    with torch.no_grad():
        for _ in range(2100):
            model(X)
    assert float(model.count) == 2100.0


@pytest.mark.parametrize("level", LEVELS)
def test_rounded_tables_are_named_with_the_cure(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        start(level, verbosity=1)
        (record,) = caplog.records
        message = record.getMessage()
        assert "rotary.inverse of Rotary" in message
        assert "mean" not in message
        assert "keep_fp32=" in message
        caplog.clear()
        model, _ = start(level, verbosity=1, keep_fp32=[Rotary])
        assert caplog.records == []
    positions = torch.arange(4096)
    exact = torch.outer(positions.double(), Rotary().inverse.double()).cos()
    assert (model.rotary(positions).double() - exact).abs().max() < 2.0**-7, "kept, its cosines are those of fp32"
    rounded, _ = start(level)
    assert (rounded.rotary(positions).double() - exact).abs().max() > 0.1, "the trap is there"


class Counter(nn.Module):
    """Counts with a buffer that has a dimension, and has a table that is saved, as scripts write both."""

    steps: torch.Tensor
    table: torch.Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("steps", torch.full((1,), start))
        self.register_buffer("table", torch.linspace(0.0, 1.0, 10))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y: torch.Tensor = self.layer(self.norm(x))
        return y


@pytest.mark.parametrize(("level", "stops"), [("O2", 2048), ("O3", 2048), ("O5", 256)])
@pytest.mark.parametrize("start", [0.0, 1.0, 4097.0], ids=["new", "from one", "loaded"])
def test_what_may_be_a_count_is_named_with_where_it_stops(
    level: str, stops: int, start: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        model = Counter(start)
        xamp.initialize(model, level=level)
        tables, counts = [record.getMessage() for record in caplog.records]
    assert "float16: table of Counter. Tables" in tables
    assert f"float16: steps of Counter. If one counts steps, it stops at {stops};" in counts
    with torch.no_grad():
        model.steps.fill_(stops - 2)
        for _ in range(5):
            model(X)
    assert float(model.steps) == stops, "as the warning says"
    caplog.clear()
    kept = Counter(start)
    with caplog.at_level(logging.WARNING, "xamp"):
        xamp.initialize(kept, level=level, keep_fp32=[Counter])
    assert caplog.records == []
    with torch.no_grad():
        kept.steps.fill_(stops - 2)
        for _ in range(5):
            kept(X)
    assert float(kept.steps) == stops + 3


@pytest.mark.parametrize("level", LEVELS)
def test_no_buffer_is_named_where_nobody_asked(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        xamp.initialize(Counter(0.0), level=level, verbosity=0)
        xamp.initialize(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), level=level)
    assert caplog.records == []


@pytest.mark.parametrize("level", LEVELS)
def test_of_a_buffer_only_what_was_written_is_rounded(level: str) -> None:
    model, _ = start(level)
    model.mean[0] = 7.0
    expected = torch.tensor([7.0, *Net().mean[1:].tolist()])
    assert torch.equal(model.state_dict()["mean"], expected)
    xamp.session(model).close()
    assert torch.equal(model.mean, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_of_a_buffer_that_is_loaded_in_16_bits_only_what_differs_is_rounded(level: str) -> None:
    """As for parameters. torch's functions fill what a file does not name with the model's own, rounded, values."""
    model, _ = start(level)
    rounded = {key: value.detach().clone() for key, value in (*model.named_parameters(), *model.named_buffers())}
    rounded["mean"][0] = 7.0
    model.load_state_dict({key: rounded.get(key, value) for key, value in model.state_dict().items()})
    assert torch.equal(model.state_dict()["mean"], torch.tensor([7.0, *Net().mean[1:].tolist()]))


@pytest.mark.parametrize("level", LEVELS)
def test_a_loaded_buffer_is_a_copy(level: str) -> None:
    model, _ = start(level)
    loaded = {**model.state_dict(), "mean": torch.tensor([0.1, 0.2, 0.3, 0.4])[: Net().mean.numel()]}
    kept = loaded["mean"].clone()
    model.load_state_dict(loaded)
    loaded["mean"].zero_()
    assert torch.equal(model.state_dict()["mean"], kept)
