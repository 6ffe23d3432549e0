"""``xamp.ema``: an fp32 average of the weights at every level, against one written by hand.

Covers: xamp.averages.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from managed_models import data_parallel
from stepping import at
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam

import xamp
from xamp import averages
from xamp.averages import was_skipped
from xamp.errors import CheckpointError, PolicyError, StateError

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
all_levels = pytest.mark.parametrize("level", LEVELS)
DECAY = 0.75


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("table", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(x)))
        return made


def net(lane: Lane) -> Net:
    torch.manual_seed(4)
    return Net().to(lane.device)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.25, momentum=0.5)


def batch(index: int, lane: Lane) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(index)).to(lane.device)


def step(model: Any, optimizer: Any, x: torch.Tensor, *, overflow: bool = False) -> None:
    optimizer.zero_grad()
    loss = model(x).float().square().mean() * (float("inf") if overflow else 1.0)
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def start(lane: Lane, level: str, decay: Any = DECAY, **options: Any) -> tuple[Net, Any, Any]:
    """A managed model, its optimizer and its average."""
    model = net(lane)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level)})
    return model, optimizer, xamp.ema(model, decay, **options)


def exact(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as ``state_dict`` has them: the masters where there are any, all in fp32."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_hand(average: dict[str, torch.Tensor], now: dict[str, torch.Tensor], decay: float) -> None:
    for name, value in now.items():
        is_buffer = "running" in name or "num_batches" in name
        average[name] = value if is_buffer else decay * average[name].double() + (1 - decay) * value.double()


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(value.double(), wanted[name].double(), rtol=2e-7, atol=1e-7)


@all_levels
@pytest.mark.parametrize("before", [True, False])
def test_it_is_the_average_written_by_hand(level: str, before: bool, lane: Lane) -> None:
    model = net(lane)
    wanted = exact(model)
    average = xamp.ema(model, DECAY) if before else None
    optimizer: Any = sgd(model)
    xamp.initialize(model, optimizer, **at(level))
    if average is None:
        wanted = exact(model)
        average = xamp.ema(model, DECAY)
    for index in range(5):
        step(model, optimizer, batch(index, lane))
        average.update()
        by_hand(wanted, exact(model), DECAY)
    assert average.updates == 5
    assert_close(average.weights, wanted)


def test_a_model_without_xamp(lane: Lane) -> None:
    model = net(lane).double()
    average = xamp.ema(model, DECAY)
    wanted = exact(model)
    for index in range(3):
        with torch.no_grad():
            model.first.weight.add_(index + 1.0)
        average.update()
        by_hand(wanted, exact(model), DECAY)
    torch.testing.assert_close(average.weights["first.weight"], wanted["first.weight"], rtol=1e-12, atol=0)


@all_levels
def test_swapped_evaluates_at_the_level_and_restores_every_bit(level: str, lane: Lane) -> None:
    model, optimizer, average = start(lane, level)
    for index in range(3):
        step(model, optimizer, batch(index, lane))
        average.update()
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *xamp.master_params(optimizer))]
    addresses = [p.data_ptr() for p in model.parameters()]
    plain = net(lane)
    plain.load_state_dict(average.state_dict()["weights"])
    reference = xamp.initialize(plain, **at(level))
    x = batch(9, lane)
    with average.swapped() as swapped:
        assert swapped is model
        assert torch.equal(model.eval()(x), reference.eval()(x))
        assert all(
            torch.equal(v.cpu(), average.state_dict()["weights"][k]) for k, v in _exact_where_kept(model).items()
        )
    with pytest.raises(ZeroDivisionError), average.swapped():
        raise ZeroDivisionError
    after = [t.detach() for t in (*model.parameters(), *model.buffers(), *xamp.master_params(optimizer))]
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(before, after, strict=True))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert not torch.equal(model(x), reference(x))


def _exact_where_kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """What ``state_dict`` holds exactly: all but low-precision tensors without a master."""
    lowered = {name for name, p in model.named_parameters() if p.dtype is not torch.float32}
    has_masters = xamp.session(model).policy.master_weights
    held = {name for name, b in model.named_buffers() if b.dtype in (torch.float16, torch.bfloat16)}
    return {k: v for k, v in model.state_dict().items() if k not in held and (has_masters or k not in lowered)}


@all_levels
def test_a_swap_between_steps_changes_no_bit_of_the_run(level: str, lane: Lane) -> None:
    models = [net(lane), net(lane)]
    for index, model in enumerate(models):
        optimizer: Any = Adam(model.parameters(), lr=0.05, eps=1e-4)
        xamp.initialize(model, optimizer, **at(level))
        average = xamp.ema(model, DECAY)
        for number in range(4):
            step(model, optimizer, batch(number, lane))
            average.update()
            if index:
                with average.swapped():
                    model.eval()(batch(7, lane))
                model.train()
    first, second = (exact(model) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_graph_from_before_a_swap_stays_usable(lane: Lane) -> None:
    model, optimizer, average = start(lane, "O2")
    loss = model(batch(0, lane)).square().mean()
    with average.swapped():
        pass
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@all_levels
def test_a_resumed_average_has_the_same_bits(level: str, lane: Lane) -> None:
    def decay(number: int) -> float:
        return min(0.9, (1 + number) / (10 + number))

    model, optimizer, average = start(lane, level, decay)
    for index in range(6):
        if index == 3:
            file = io.BytesIO()
            states = (model.state_dict(), optimizer.state_dict(), xamp.state_dict(optimizer), average.state_dict())
            torch.save(states, file)
        step(model, optimizer, batch(index, lane))
        average.update()
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    again, other, resumed = start(lane, level, decay)
    resumed.load_state_dict(saved[3])
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    xamp.load_state_dict(saved[2], other)
    for index in range(3, 6):
        step(again, other, batch(index, lane))
        resumed.update()
    assert resumed.updates == average.updates == 6
    assert all(torch.equal(resumed.weights[name], value) for name, value in average.weights.items())


def test_a_state_loads_at_another_level_and_is_checked_first(lane: Lane) -> None:
    model = net(lane)
    average = xamp.ema(model, DECAY)
    state = average.state_dict()
    assert {v.device.type for v in state["weights"].values()} == {"cpu"}
    other = net(lane)
    xamp.initialize(other, sgd(other), **at("O2"))
    resumed = xamp.ema(other, DECAY)
    with torch.no_grad():
        state["weights"]["last.bias"].fill_(7.0)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.weights["last.bias"].cpu(), torch.full((2,), 7.0))
    before = {name: value.clone() for name, value in resumed.weights.items()}
    for wrong, message in (
        ({**state, "weights": {**state["weights"], "first.bias": torch.ones(3)}}, r"first\.bias'\] has shape \(3,\)"),
        ({**state, "weights": {"last.bias": torch.ones(2)}}, r"first\.bias'\] is missing"),
        ({**state, "weights": {**state["weights"], "more": torch.ones(2)}}, r"'more'\] is nothing that this average"),
        ({**state, "weights": {**state["weights"], "last.bias": [1.0]}}, "is a list, and must be a tensor"),
        ({**state, "updates": -1}, "'updates'\\] is -1"),
        ({**state, "schema": 2}, "'schema'\\] is 2"),
        ({"scale": 1.0}, "not one of xamp.ema"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resumed.load_state_dict(wrong)
    assert all(torch.equal(value, before[name]) for name, value in resumed.weights.items())


@pytest.mark.parametrize("buffers", ["copy", "average", "leave"])
def test_buffers(buffers: str, lane: Lane) -> None:
    model = net(lane)
    average = xamp.ema(model, DECAY, buffers=buffers)
    model(batch(0, lane))
    average.update()
    mean, count = model.norm.running_mean, model.norm.num_batches_tracked
    assert mean is not None
    assert count is not None
    assert "table" not in average.weights
    if buffers == "leave":
        assert "norm.running_mean" not in average.weights
    else:
        factor = 1.0 if buffers == "copy" else 1.0 - DECAY
        torch.testing.assert_close(average.weights["norm.running_mean"], factor * mean)
        assert torch.equal(average.weights["norm.num_batches_tracked"], count)


def test_a_schedule_is_asked_for_each_update(lane: Lane) -> None:
    asked: list[int] = []

    def decay(number: int) -> float:
        asked.append(number)
        return 0.0 if number == 0 else 0.5

    model = nn.Linear(1, 1, bias=False).to(lane.device)
    average = xamp.ema(model, decay)
    for value in (2.0, 6.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()
    assert asked == [0, 1]
    assert float(average.weights["weight"]) == 4.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("applied_only", [None, True, False])
def test_skipped_steps_are_left_out_unless_they_are_asked_for(
    level: str, buffers: str, on_device: bool, applied_only: bool | None, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the outcome is a flag that the host does not read."""
    needs_values(lane)
    if on_device:

        def flag(*args: Any) -> torch.Tensor:
            return torch.tensor(float(was_skipped(*args)), device=lane.device)

        monkeypatch.setattr(averages, "was_skipped", flag)
    model, optimizer, average = start(lane, level, buffers=buffers, applied_only=applied_only)
    wanted = exact(model)
    for index in range(6):
        step(model, optimizer, batch(index, lane), overflow=index in (0, 3))
        average.update()
        if index not in (0, 3) or applied_only is False:
            now = exact(model)
            before = {name: value for name, value in wanted.items() if "running" in name}
            by_hand(wanted, now, DECAY)
            if buffers == "average":
                wanted.update({name: DECAY * b.double() + (1 - DECAY) * now[name] for name, b in before.items()})
    assert_close(average.weights, wanted)
    assert average.updates == average.state_dict()["updates"] == (6 if applied_only is False else 4)


def test_only_the_optimizers_of_the_model_count(lane: Lane) -> None:
    """Of two models in a session, of which one skips; and a model that nothing manages."""
    needs_values(lane)
    models, plain = [net(lane), net(lane)], net(lane)
    optimizers: Any = [sgd(model) for model in models]
    xamp.initialize(models, optimizers, init_scale=64.0, **at("O1"))
    averages_ = [xamp.ema(model, DECAY) for model in (*models, plain)]
    for model, optimizer, overflow in zip(models, optimizers, (True, False), strict=True):
        step(model, optimizer, batch(0, lane), overflow=overflow)
    for average in averages_:
        average.update()
    assert [average.updates for average in averages_] == [0, 1, 1]


def test_a_grad_scaler_can_tell_what_was_applied(lane: Lane) -> None:
    needs_values(lane)
    model = nn.Linear(2, 1).to(lane.device)
    optimizer, scaler = sgd(model), xamp.GradScaler(init_scale=4.0)
    average = xamp.ema(model, 0.5, applied_only=scaler)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2, device=lane.device)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update()
    assert average.updates == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_wrapped_and_compiled_models(level: str, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    make = data_parallel(lane, monkeypatch)
    model = net(lane)
    optimizer: Any = sgd(model)
    xamp.initialize(model, optimizer, **at(level))
    wrapped = make(torch.compile(model, backend="eager"))
    average = xamp.ema(wrapped, DECAY)
    assert set(average.weights) == set(model.state_dict())
    wanted = exact(model)
    for index in range(2):
        step(model, optimizer, batch(index, lane))
        average.update()
        by_hand(wanted, exact(model), DECAY)
    assert_close(average.weights, wanted)
    x = batch(8, lane)
    copied = average.copy().eval()
    with average.swapped():
        assert torch.equal(wrapped.eval()(x), copied(x))
    assert not torch.equal(wrapped(x), copied(x))


@all_levels
def test_a_copy_runs_under_the_same_policy(level: str, lane: Lane) -> None:
    model, optimizer, average = start(lane, level)
    step(model, optimizer, batch(0, lane))
    average.update()
    made = average.copy()
    x = batch(5, lane)
    with average.swapped():
        wanted = model.eval()(x)
    assert torch.equal(made.eval()(x), wanted)
    assert made is not model
    assert [p.dtype for p in made.parameters()] == [p.dtype for p in model.parameters()]
    with torch.no_grad():
        made.get_parameter("last.bias").fill_(5.0)
    assert float(average.weights["last.bias"].max()) < 5.0


def test_after_close_it_goes_on(lane: Lane) -> None:
    model, optimizer, average = start(lane, "O2", 0.5)
    step(model, optimizer, batch(0, lane))
    xamp.session(model).close()
    before = average.weights["last.bias"].clone()
    average.update()
    torch.testing.assert_close(average.weights["last.bias"], 0.5 * before + 0.5 * model.last.bias.detach())


def test_wrong_use_is_told() -> None:
    model = nn.Linear(2, 2)
    for decay in (1.5, -0.1, "0.9", True, None):
        with pytest.raises(PolicyError, match=r"ema\(decay=.*from 0 to 1"):
            xamp.ema(model, decay)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"ema\(buffers='both'\).*'copy', 'average', 'leave'"):
        xamp.ema(model, 0.9, buffers="both")
    with pytest.raises(PolicyError, match=r"must be an nn\.Module"):
        xamp.ema(SGD(model.parameters(), lr=0.1), 0.9)  # type: ignore[arg-type]
    average = xamp.ema(model, lambda _: 2.0)
    with pytest.raises(PolicyError, match="from 0 to 1"):
        average.update()
    with average.swapped():
        for call in (average.update, average.copy, lambda: average.load_state_dict({})):
            with pytest.raises(StateError, match=r"inside `with average\.swapped"):
                call()
        with pytest.raises(StateError, match="inside"), average.swapped():
            pass
    average = xamp.ema(model, 0.5)
    model.weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(StateError, match=r"'weight' now has shape \(3, 2\), and its average \(2, 2\)"):
        average.update()


def test_parameters_that_come_and_go(lane: Lane) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(lane.device)
    average = xamp.ema(model, 0.5)
    del model[1]
    model.append(nn.Linear(2, 3).to(lane.device))
    with pytest.raises(StateError, match=r"'1\.weight' now has shape"):
        average.update()
    model.add_module("head", nn.Linear(2, 1).to(lane.device))
    delattr(model, "1")
    average.update()
    assert set(average.weights) == {"0.weight", "0.bias", "head.weight", "head.bias"}
    assert torch.equal(average.weights["head.weight"], model.get_parameter("head.weight"))


@pytest.fixture
def one_rank(tmp_path: pathlib.Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_of_a_sharded_model_it_averages_the_shards(one_rank: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=64.0)
    average = xamp.ema(model, 0.5)
    wanted = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    for index in range(2):
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.ones(2, 4) * (index + 1)).square().mean(), optimizer) as scaled:
            scaled.backward()
        norm = xamp.clip_grad_norm_(optimizer, 1.0)
        assert type(norm) is torch.Tensor, "the norm over all shards, which one rank may read"
        assert xamp.session(model).metrics()["grad_norm"] == float(norm) > 0
        optimizer.step()
        average.update()
        local = [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        wanted = [0.5 * a + 0.5 * b for a, b in zip(wanted, local, strict=True)]
    for found, by_hand_ in zip(average.weights.values(), wanted, strict=True):
        torch.testing.assert_close(found, by_hand_, rtol=2e-7, atol=1e-7)
    with average.swapped():
        swapped = [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(swapped, average.weights.values(), strict=True))
    assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), local, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_ddp_around_the_model(level: str, one_rank: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, verbosity=0, level=level)
    ddp = nn.parallel.DistributedDataParallel(model)
    average, twin = xamp.ema(ddp, 0.5), xamp.ema(model, 0.5)
    assert set(average.weights) == {"weight", "bias"}
    step(ddp, optimizer, torch.ones(2, 4))
    average.update()
    twin.update()
    x = torch.ones(1, 4)
    with average.swapped():
        inside = ddp(x)
    with twin.swapped():
        assert torch.equal(ddp(x), inside)


def test_swapped_inside_of_autocast_computes_with_the_average(lane: Lane) -> None:
    if "bfloat16" not in lane.can.dtypes:
        pytest.skip(f"{lane} has no bfloat16")
    model = nn.Linear(4, 4, bias=False).to(lane.device)
    average = xamp.ema(model, 0.5)
    with torch.no_grad():
        model.weight.zero_()
    x = torch.ones(2, 4, device=lane.device)
    with torch.autocast(lane.device.type, dtype=torch.bfloat16):
        assert not model(x).any()
        with average.swapped():
            assert model(x).any()
        assert not model(x).any()


def test_a_copy_of_a_model_that_shares_a_buffer() -> None:
    model: Any = nn.Module()
    model.a, model.b, shared = nn.Module(), nn.Module(), torch.arange(3.0)
    model.a.register_buffer("t", shared, persistent=False)
    model.b.register_buffer("t", shared)
    copied: Any = xamp.ema(model, 0.9).copy()
    assert torch.equal(copied.b.t, shared)
