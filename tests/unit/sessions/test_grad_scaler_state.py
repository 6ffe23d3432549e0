"""The state of a GradScaler: saved, loaded, to and from torch's and others', pickled and copied.

Covers: xamp.sessions.grad_scaler, xamp.sessions.formats.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import Lane
from scaler_comparison import data, net, spoil, theirs
from stepping import assert_same
from torch import nn
from torch.optim import Adam

import xamp
from xamp.errors import CheckpointError

RECORDED = Path(__file__).parents[2] / "data" / "torch_npu" / "scalers.json"
NPU_SCALERS: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORDED.read_text(encoding="utf-8"))
STATE = {"scale": 640.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4, "_growth_tracker": 2}


class Run:
    """A training whose scaler is exchanged on the way."""

    def __init__(self, lane: Lane) -> None:
        torch.manual_seed(0)
        self.lane = lane
        self.model = net(device=lane.device)
        self.optimizer = Adam(self.model.parameters(), lr=0.01)
        self.index = 0

    def train(self, scaler: Any, count: int) -> list[Any]:
        seen: list[Any] = []
        for _ in range(count):
            self.index += 1
            self.optimizer.zero_grad()
            scaler.scale(self.model(data(self.index, self.lane.device)).square().mean()).backward()
            if self.index % 7 == 5:
                spoil(self.model.parameters(), lane=self.lane)
            scaler.step(self.optimizer)
            scaler.update()
            seen.append(
                (scaler.get_scale(), scaler._get_growth_tracker(), [p.detach().clone() for p in self.weights()])
            )
        return seen

    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def make(kind: str, lane: Lane, **options: Any) -> Any:
    return xamp.GradScaler(**options) if kind == "xamp" else theirs(lane, **options)


def state_of(scaler: Any) -> dict[str, Any]:
    found: dict[str, Any] = scaler.state_dict()
    return found


@pytest.mark.parametrize("way", ["xamp xamp", "xamp torch xamp", "torch xamp torch", "torch xamp"])
@pytest.mark.parametrize("used", [False, True])
def test_a_run_goes_on_as_if_its_scaler_had_never_been_exchanged(way: str, used: bool, lane: Lane) -> None:
    """``used``: the state is loaded into a scaler that has its scale on the device already."""
    options: dict[str, Any] = {"init_scale": 512.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.125}
    whole = Run(lane).train(theirs(lane, **options), 30)
    run, seen = Run(lane), []
    scaler: Any = None
    for kind in way.split():
        before, scaler = scaler, make(kind, lane, **(options if scaler is None else {}))
        if used:
            scaler.scale(torch.ones((), device=lane.device))
        if before is not None:
            scaler.load_state_dict(OrderedDict(state_of(before)))
            assert state_of(scaler) == state_of(before)
        seen += run.train(scaler, 30 // len(way.split()))
    assert_same(seen, whole)


def test_the_state_is_torchs_key_by_key(lane: Lane) -> None:
    found, wanted = xamp.GradScaler().state_dict(), theirs(lane).state_dict()
    assert found == wanted
    assert list(found) == list(wanted)
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == found


def test_a_loss_scaled_before_loading_does_not_go_backward() -> None:
    for scaler in (xamp.GradScaler(), theirs()):
        weight = nn.Parameter(torch.ones(2))
        loss = scaler.scale((weight * 2).sum())
        scaler.load_state_dict(STATE)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(("dynamic", "factors"), [(True, (3.0, 0.25)), (False, (1.0, 1.0))])
def test_the_state_of_torch_npus(dynamic: bool, factors: tuple[float, float]) -> None:
    scaler = xamp.GradScaler()
    scaler.load_state_dict({**STATE, "dynamic": dynamic})
    assert scaler.get_scale() == 640.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == factors


@pytest.mark.parametrize("version", NPU_SCALERS)
def test_the_states_that_each_release_of_torch_npu_wrote(version: str) -> None:
    factors = {"dynamic": (1024.0, 4.0, 0.25, 1), "static": (256.0, 1.0, 1.0, 0)}
    for name, state in NPU_SCALERS[version].items():
        scaler = xamp.GradScaler(growth_factor=8.0)
        scaler.load_state_dict(state)
        found = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor())
        assert (*found, scaler._get_growth_tracker()) == factors[name]
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    xamp.initialize(model, optimizer, "O1", init_scale=32.0, verbosity=0)
    xamp.load_state_dict(NPU_SCALERS[version]["dynamic"], optimizer)
    assert xamp.state_dict(optimizer)["scalers"] == [{"dynamic": True, "scale": 1024.0, "growth_tracker": 1}]
    xamp.session(model).close()


def test_the_states_of_apex_and_of_a_session() -> None:
    scaler = xamp.GradScaler(growth_interval=10)
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}})
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()) == (128.0, 7, 10)
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    xamp.initialize(model, optimizer, "O1", init_scale=32.0, verbosity=0)
    scaler.load_state_dict(xamp.state_dict(optimizer))
    assert scaler.get_scale() == 32.0
    xamp.session(model).close()
    two = {f"loss_scaler{i}": {"loss_scale": 128.0, "unskipped": 7} for i in range(2)}
    with pytest.raises(CheckpointError, match="it holds 2 loss scales, and a GradScaler has one"):
        scaler.load_state_dict(two)


@pytest.mark.parametrize(
    ("tracker", "interval", "scales"),
    [(4, 4, [640.0, 1920.0]), (9, 4, [640.0, 1920.0]), (3, 4, [640.0, 1920.0]), (0, 0, [640.0, 640.0])],
)
def test_a_count_beyond_the_interval(tracker: int, interval: int, scales: list[float], lane: Lane) -> None:
    """Where torch's scale would never grow again, because it asks whether the count equals the interval."""
    scaler = xamp.GradScaler()
    scaler.load_state_dict({**STATE, "_growth_tracker": tracker, "growth_interval": interval})
    weight = nn.Parameter(torch.ones(2, device=lane.device))
    optimizer = Adam([weight])
    found = [scaler.get_scale()]
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [*found, scaler.get_scale()] == scales


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": None}, "state['scale']: must be a finite number above 0"),
        ({"scale": 0.0}, "state['scale']: must be a finite number above 0"),
        ({"scale": float("inf")}, "state['scale']: must be a finite number above 0"),
        ({"scale": 1e300}, "state['scale']: must be a finite number above 0 that fp32 can hold"),
        ({"scale": 1e-300}, "state['scale']: must be a finite number above 0 that fp32 can hold"),
        ({"growth_factor": "2"}, "state['growth_factor']: must be a finite number above 0"),
        ({"backoff_factor": -1.0}, "state['backoff_factor']: must be a finite number above 0"),
        ({"growth_interval": 2.5}, "state['growth_interval']: must be a whole number"),
        ({"_growth_tracker": -1}, "state['_growth_tracker']: must be a whole number"),
        ({"dynamic": 1}, "state['dynamic']: must be True or False"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_wrong_value_is_named_and_nothing_is_changed(change: dict[str, Any], text: str, begun: bool) -> None:
    scaler = xamp.GradScaler(init_scale=8.0)
    if begun:
        scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match=re.escape(f"GradScaler.load_state_dict(state): {text}")):
        scaler.load_state_dict({**STATE, **change})
    assert scaler.state_dict() == before
    assert float(scaler.scale(torch.ones(()))) == 8.0


@pytest.mark.parametrize("key", STATE)
def test_a_missing_key_is_named(key: str) -> None:
    scaler = xamp.GradScaler()
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match=f"the key '{key}' is missing"):
        scaler.load_state_dict({k: v for k, v in STATE.items() if k != key})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("wrong", [None, 3, [], "state", {"epoch": 3}])
def test_what_is_no_state(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match=r"GradScaler.load_state_dict\(state\)"):
        xamp.GradScaler().load_state_dict(wrong)


def test_an_empty_state_is_refused_as_torch_refuses_it() -> None:
    for scaler in (xamp.GradScaler(), theirs()):
        with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it was saved from a"):
            scaler.load_state_dict({})
    with pytest.raises(CheckpointError, match="disabled instance of GradScaler"):
        xamp.GradScaler().load_state_dict(xamp.GradScaler(enabled=False).state_dict())


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("begun", [False, True])
def test_a_copy_goes_on_by_itself(way: Any, begun: bool, lane: Lane) -> None:
    scaler = xamp.GradScaler(init_scale=512.0, growth_interval=3)
    scaler.min_loss_scale, scaler.max_loss_scale = 4.0, 4096.0
    run = Run(lane)
    if begun:
        run.train(scaler, 4)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1024.0, 1)
    other = way(scaler)
    assert other.state_dict() == scaler.state_dict()
    assert (other.min_loss_scale, other.max_loss_scale) == (4.0, 4096.0)
    before = scaler.state_dict()
    twin = copy.deepcopy(run)
    found = twin.train(other, 8)
    assert scaler.state_dict() == before, "the two share nothing"
    assert_same(found, run.train(scaler, 8))


def test_a_disabled_one_is_pickled() -> None:
    scaler = pickle.loads(pickle.dumps(xamp.GradScaler(enabled=False)))
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}
