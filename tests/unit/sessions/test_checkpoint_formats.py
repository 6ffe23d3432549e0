"""States of torch's and torch_npu's GradScaler and of apex.amp are read; the first and the last are written.

Covers: xamp.sessions.formats, xamp.sessions.checkpoint.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from checkpoints import Run, everything, load, start, through_a_file, train
from lanes import Lane
from managed_models import Net
from stepping import Dot, assert_same, inputs, twin
from torch.optim import SGD

import xamp
from xamp.errors import CheckpointError, PolicyError

pytestmark = pytest.mark.usefixtures("no_other_sessions")


class Plain:
    """The loop of torch.amp's manual, in fp32, whose GradScaler overflows at some steps."""

    def __init__(self, lane: Lane, model: Any = None, **options: Any) -> None:
        self.lane = lane
        self.model: Any = Dot().to(lane.device) if model is None else model
        self.optimizer = SGD(self.model.parameters(), lr=0.125, momentum=0.9)
        told = {"init_scale": 64.0, "growth_interval": 3, **options}
        self.scaler = torch.amp.GradScaler(lane.device.type, **told)

    def step(self, x: torch.Tensor, *, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        self.lane.backend.clear_overflow(self.lane.device)  # a flag that the run beside this one left up
        self.scaler.scale(self.model(x)).backward()
        if overflow:
            self.lane.overflow_(self.model.a.grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def managed(lane: Lane, model: Any, **options: Any) -> Run:
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    told = {
        "level": "O1",
        "growth_interval": 3,
        "fused": False,
        "verbosity": 0,
    }  # a fused implementation's last bits differ
    xamp.initialize(model, optimizer, **{**told, **options})
    return Run(model, optimizer)


def step(run: Run, lane: Lane, x: torch.Tensor, *, overflow: bool = False) -> None:
    run.optimizer.zero_grad()
    with xamp.scale_loss(run.model(x), run.optimizer) as scaled:
        scaled.backward()
        if overflow:
            lane.overflow_(run.model.a.grad)
    run.optimizer.step()


OVERFLOWS = (3, 11, 12, 17)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_run_under_torchs_scaler_goes_on_here(lane: Lane, dynamic: bool | None) -> None:
    """Twenty more steps, the same weights and scales as if it had stayed there; with ``dynamic`` as torch_npu's."""
    plain = Plain(lane)
    xs = inputs(40, lane)
    for i in range(20):
        plain.step(xs[i], overflow=i in OVERFLOWS)
    state = through_a_file(plain.scaler.state_dict())
    if dynamic is not None:
        state["dynamic"] = dynamic
    run = managed(lane, twin(plain.model))
    run.optimizer.load_state_dict(through_a_file(plain.optimizer.state_dict()))
    xamp.load_state_dict(state, run.optimizer)
    for i in range(20, 40):
        plain.step(xs[i], overflow=i - 20 in OVERFLOWS)
        step(run, lane, xs[i], overflow=i - 20 in OVERFLOWS)
        assert run.scale == plain.scaler.get_scale(), i
    assert_same([p.detach() for p in run.model.parameters()], [p.detach() for p in plain.model.parameters()])
    assert xamp.state_dict(run.optimizer, format="torch") == plain.scaler.state_dict()


@pytest.mark.parametrize("scale", [1.0, 128.0, 100.0])
def test_a_static_scale_written_for_torch_skips_and_stays(lane: Lane, scale: float) -> None:
    run = managed(lane, Dot().to(lane.device), loss_scale=scale)
    state = xamp.state_dict(run.optimizer, format="torch")
    assert list(state) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    plain = Plain(lane, growth_interval=1)
    plain.scaler.load_state_dict(state)
    x = inputs(1, lane)[0]
    for i in range(6):
        before = plain.model.a.detach().clone()
        plain.step(x, overflow=i == 3)
        assert torch.equal(plain.model.a.detach(), before) == (i == 3)
        assert plain.scaler.get_scale() == scale


@pytest.mark.parametrize(("options", "dynamic"), [({}, True), ({"loss_scale": 32.0}, False)])
def test_what_is_written_for_torch_npu_has_its_six_keys(lane: Lane, options: Any, dynamic: bool) -> None:
    run = managed(lane, Dot().to(lane.device), init_scale=64.0, **options)
    assert xamp.state_dict(run.optimizer, format="torch_npu") == {
        "scale": 64.0 if dynamic else 32.0,
        "growth_factor": 2.0 if dynamic else 1.0,
        "backoff_factor": 0.5 if dynamic else 1.0,
        "growth_interval": 3 if dynamic else 2**31 - 1,
        "_growth_tracker": 0,
        "dynamic": dynamic,
    }


@pytest.mark.parametrize("kind", ["torch", "torch_npu"])
def test_several_losses_are_a_list_and_come_back(lane: Lane, kind: str) -> None:
    run = managed(lane, Dot().to(lane.device), num_losses=3)
    for index, scaler in enumerate(run_scalers(run)):
        scaler.set(2.0**index, index % 3)
    states = xamp.state_dict(run.optimizer, format=kind)
    assert [(s["scale"], s["_growth_tracker"]) for s in states] == [(1.0, 0), (2.0, 1), (4.0, 2)]
    other = managed(lane, Dot().to(lane.device), num_losses=3)
    xamp.load_state_dict(through_a_file(states), other.optimizer)
    assert xamp.state_dict(other.optimizer, format=kind) == states
    xamp.load_state_dict(tuple(states), other.optimizer)
    fewer = managed(lane, Dot().to(lane.device), num_losses=2)
    with pytest.raises(CheckpointError, match=r"it holds 3 loss scales, and .*num_losses=2"):
        xamp.load_state_dict(states, fewer.optimizer)


def run_scalers(run: Run) -> Any:
    return xamp.session(run.optimizer).engine.scalers


@pytest.mark.parametrize("kind", ["apex", "XAMP", "", None, 1, ("torch",)])
def test_no_other_format_is_written(lane: Lane, kind: Any) -> None:
    run = managed(lane, Dot().to(lane.device))
    with pytest.raises(
        PolicyError, match=r"state_dict\(format=.*no such format. Choices: 'xamp', 'torch', 'torch_npu'"
    ):
        xamp.state_dict(run.optimizer, format=kind)
    with pytest.raises(PolicyError, match="no such format"):
        xamp.session(run.optimizer).state_dict(kind)


# ---------------------------------------------------------------- apex


def apex(*scales: tuple[float, int]) -> dict[str, Any]:
    """What apex.amp.state_dict() gives: an OrderedDict."""
    made: dict[str, Any] = collections.OrderedDict()
    for index, (scale, unskipped) in enumerate(scales):
        made[f"loss_scaler{index}"] = {"loss_scale": scale, "unskipped": unskipped}
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_apexs_state_is_read_by_the_number_in_the_key(lane: Lane, count: int) -> None:
    state = apex(*((2.0**i, i % 3) for i in range(count)))
    backwards = dict(reversed(through_a_file(state).items()))
    for found in (state, backwards):
        run = managed(lane, Dot().to(lane.device), num_losses=count)
        xamp.load_state_dict(found, run.optimizer)
        assert xamp.state_dict(run.optimizer)["scalers"] == [
            {"dynamic": True, "scale": 2.0**i, "growth_tracker": i % 3} for i in range(count)
        ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (apex((1.0, 0), (1.0, 0)), "it holds 2 loss scales, and initialize was called with num_losses=1"),
        ({**apex((1.0, 0)), "foo": 1}, "the key 'loss_scaler1' is missing"),
        ({"loss_scaler1": {"loss_scale": 1.0, "unskipped": 0}}, "the key 'loss_scaler0' is missing"),
        ({"loss_scaler0": {"loss_scale": 1.0}}, r"state\['loss_scaler0'\]: the key 'unskipped' is missing"),
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0, "x": 1}}, r"\['loss_scaler0'\]: unknown key 'x'"),
        ({"loss_scaler0": 65536.0}, r"state\['loss_scaler0'\]: must be a dict, and is float"),
        (apex((float("nan"), 0)), r"\['loss_scaler0'\]\['loss_scale'\]: must be a finite number above 0.*is nan"),
        (apex((0.0, 0)), r"\['loss_scaler0'\]\['loss_scale'\]: must be a finite number above 0.*is 0.0"),
        (apex((1.0, -1)), r"\['loss_scaler0'\]\['unskipped'\]: must be a whole number from 0"),
        (apex((1.0, 0.5)), r"\['loss_scaler0'\]\['unskipped'\]: must be a whole number.*is 0.5"),  # type: ignore[arg-type]
    ],
)
def test_apexs_state_with_something_wrong(lane: Lane, state: Any, message: str) -> None:
    run = start(lane, "O2")
    before = everything(run)
    with pytest.raises(CheckpointError, match=message):
        xamp.load_state_dict(state, run.optimizer)
    assert_same(everything(run), before)


# ---------------------------------------------------------------- torch and torch_npu


def gradscaler(**changes: Any) -> dict[str, Any]:
    made = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 2}
    return {**made, **changes}


def test_an_interval_beyond_what_xamp_takes_is_still_read(lane: Lane) -> None:
    """People give torch's scaler one that is never reached; xamp keeps its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**10)
    scaler.scale(torch.ones(()))
    run = start(lane, "O1")
    xamp.load_state_dict(scaler.state_dict(), run.optimizer)
    assert run.scale == 8.0


def test_the_weights_of_a_torch_run_come_with_it_at_o2(lane: Lane) -> None:
    """As the docs say: the model's and the optimizer's states as they are, and the scaler's."""
    torch.manual_seed(3)
    model = Net().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    model(torch.randn(4, 4).to(lane.device))[0].sum().backward()
    optimizer.step()
    run = start(lane, "O2")
    load(run, through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "xamp": gradscaler()}))
    assert_same([p.detach() for p in xamp.master_params(run.optimizer)], [p.detach() for p in model.parameters()])
    assert (run.scale, xamp.state_dict(run.optimizer)["scalers"][0]["growth_tracker"]) == (8.0, 2)
    train(run, lane, [0])
    assert run.scale == 16.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "the state is empty, perhaps saved from a disabled GradScaler"),
        ([], "state itself: must be a dict, and is list. What can be read is the state of xamp.state_dict"),
        ([gradscaler(), 1], r"state\[1\]: must be a dict, and is int"),
        ([gradscaler(), {}], r"state\[1\]: the key '_growth_tracker' is missing"),
        ([gradscaler(), gradscaler()], "it holds 2 loss scales, and initialize was called with num_losses=1"),
        ({"scale": 1.0}, "the key '_growth_tracker' is missing"),
        (gradscaler(scale=0.0), r"state\['scale'\]: must be a finite number above 0 that fp32 can hold, and is 0.0"),
        (gradscaler(scale=1e300), r"state\['scale'\]: must be a finite number above 0 that fp32 can hold"),
        (gradscaler(scale=10**400), r"state\['scale'\]: must be .*, and is a number of 1329 bits"),
        (gradscaler(scale=True), r"state\['scale'\]: must be .* and is True"),
        (gradscaler(growth_factor="2"), r"state\['growth_factor'\]: must be a finite number above 0.* is '2'"),
        (
            gradscaler(growth_interval=2**63),
            r"state\['growth_interval'\]: must be a whole number from 0 to 2\*\*63 - 1",
        ),
        (
            gradscaler(_growth_tracker=2**31),
            r"state\['_growth_tracker'\]: must be .* from 0 to 2\*\*31 - 1, and is 2147",
        ),
        (gradscaler(dynamic=1), r"state\['dynamic'\]: must be True or False, and is 1"),
        (
            {"param_groups": [], "state": {}},
            "no known format has the keys 'param_groups', 'state'. What can be read is",
        ),
        ({1: 2}, "no known format has the keys 1"),
        (None, "must be a dict, and is NoneType"),
        ("state", "must be a dict, and is str"),
    ],
)
def test_a_scalers_state_with_something_wrong(lane: Lane, state: Any, message: str) -> None:
    run = start(lane, "O2")
    before = everything(run)
    with pytest.raises(CheckpointError, match=rf"load_state_dict\(state\): .*{message}.*Nothing was loaded"):
        xamp.load_state_dict(state, run.optimizer)
    assert_same(everything(run), before)


@pytest.mark.parametrize("state", ["torch_npu", "xamp"])
def test_a_static_scale_that_a_dynamic_session_leaves_out_is_told(state: str, caplog: pytest.LogCaptureFixture) -> None:
    def session(loss_scale: Any) -> torch.optim.Optimizer:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, "O2", loss_scale=loss_scale, verbosity=0)
        models.append(model)
        return optimizer

    models: list[torch.nn.Module] = []
    saved = xamp.state_dict(session(128.0), format=state)
    if state == "xamp":
        saved["masters"] = []
    with caplog.at_level("WARNING", "xamp"):
        xamp.load_state_dict(saved, there := session("dynamic"))
    assert xamp.loss_scale(there) == 65536.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "loss scale of 128.0 is static and was not loaded" in line
    assert "stays 65536.0" in line
    caplog.clear()
    with caplog.at_level("WARNING", "xamp"):
        xamp.load_state_dict(saved, session(8.0))
        xamp.load_state_dict(xamp.state_dict(there), session("dynamic"))
    assert not caplog.records
