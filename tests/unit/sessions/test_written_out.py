"""Managed models that leave Python, or that something else averages: TorchScript, ONNX, files with a dtype, SWA.

Covers: xamp.sessions.averaged_models, xamp.sessions.lowering.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import pathlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, swa_utils

import xamp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CAST = ["O2", "O3", "O5"]
X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
scripted = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in its own exporters


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model: nn.Module, level: str, steps: int = 2, after: Any = lambda: None, **options: Any) -> SGD:
    optimizer = SGD(model.parameters(), lr=0.25)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=64.0, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        after()
    return optimizer


# ---------------------------------------------------------------- torch.jit.script


@scripted
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("around", [lambda m: m, lambda m: nn.Sequential(m, nn.ReLU())], ids=["itself", "a container"])
def test_scripting_a_managed_model_is_refused_with_the_ways_that_work(level: str, around: Any) -> None:
    model = net().eval()
    xamp.initialize(model, level=level, verbosity=0)
    whole = around(model)
    before = type(model)
    with pytest.raises(
        xamp.StateError, match=r"leave its policy out.*ScriptModule, which O0, O1 and O4 take.*close\(\)"
    ):
        torch.jit.script(whole)
    assert type(model) is before
    assert torch.equal(torch.jit.trace(model, (X,))(X), model(X)), "as the message says"
    xamp.session(model).close()
    assert torch.equal(torch.jit.script(whole)(X), whole(X))


@scripted
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_managed_script_module_inside_another_is_refused(level: str) -> None:
    inner: Any = torch.jit.script(net().eval())
    xamp.initialize(inner, level=level, verbosity=0)
    twin = copy.deepcopy(inner)
    for module in (inner, twin):
        with pytest.raises(xamp.StateError, match="leave its policy out"):
            torch.jit.script(nn.Sequential(module, nn.ReLU()))
    xamp.session(inner).close()
    assert torch.jit.script(nn.Sequential(inner, nn.ReLU()))(X).dtype is torch.float32


# ---------------------------------------------------------------- legacy ONNX export


@scripted
@pytest.mark.parametrize("level", LEVELS)
def test_legacy_onnx_export(level: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are compared in tests/libraries, which has ``onnx``; torch asks for it at the end."""
    internal = "torch.onnx._internal"
    moved = importlib.util.find_spec(f"{internal}.torchscript_exporter") is not None  # since torch 2.9
    utils: Any = importlib.import_module(f"{internal}{'.torchscript_exporter' if moved else ''}.onnx_proto_utils")
    monkeypatch.setattr(utils, "_add_onnxscript_fn", lambda proto, _: proto)
    model = net()
    train(model, level)
    model.eval()
    expected, state = model(X), copy.deepcopy(model.state_dict())
    torch.onnx.export(model, (X,), str(tmp_path / "model.onnx"), dynamo=False)
    found = (tmp_path / "model.onnx").read_bytes()
    computed = state["0.bias"].to(xamp.session(model).policy.dtype).view(torch.uint8).numpy().tobytes()
    assert computed in found, "the weights are in it, in the dtype of the level"
    assert torch.equal(model(X), expected)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), "and fp32 again"


# ---------------------------------------------------------------- files with a dtype beside them


class Part(nn.Module):
    """As a model of transformers: it writes what it holds, and beside it the dtype that it says it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.to(self.dtype))
        return y

    def save_pretrained(self, folder: pathlib.Path, fail: bool = False) -> None:
        (folder / "dtype.json").write_text(json.dumps([str(self.dtype), type(self).__name__]))
        if fail:
            raise OSError("no space left")
        torch.save(self.state_dict(), folder / "weights.pt")

    @classmethod
    def from_pretrained(cls, folder: pathlib.Path) -> Part:
        dtype, name = json.loads((folder / "dtype.json").read_text())
        made = (Whole if name == "Whole" else Part)().to(getattr(torch, dtype.removeprefix("torch.")))
        made.load_state_dict(torch.load(folder / "weights.pt"))
        return made


class Whole(Part):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(super().forward(x))
        return y


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", [lambda m: m, lambda m: m.part], ids=["model", "part"])
def test_what_a_model_writes_comes_back_exact(level: str, which: Any, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = Whole()
    train(model, level)
    found: Part = which(model)
    computes = found.dtype
    with pytest.raises(OSError, match="no space"):
        found.save_pretrained(tmp_path, fail=True)
    found.save_pretrained(tmp_path)
    again = Part.from_pretrained(tmp_path)
    expected = found.state_dict()
    assert again.dtype is torch.float32
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    assert found.dtype is computes, "as before, also after the failure"
    assert model(X).dtype is torch.float32
    xamp.session(model).close()
    assert (type(model), type(model.part)) == (Whole, Part)


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_16_bit_copy_writes_16_bits_and_a_pickle_fp32(level: str, way: str, tmp_path: pathlib.Path) -> None:
    model = Whole()
    xamp.initialize(model, level=level, verbosity=0)
    copied = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    copied.save_pretrained(tmp_path)
    written = xamp.session(model).policy.dtype if way == "deepcopy" else torch.float32
    assert Part.from_pretrained(tmp_path).dtype is written
    assert isinstance(copied.part, Part)


# ---------------------------------------------------------------- averages of weights


def averaged(states: list[dict[str, torch.Tensor]], decay: float | None) -> dict[str, torch.Tensor]:
    """The mean, or the exponential average, of floating tensors, in fp64. The first state is taken as it is."""
    found = {key: value.double() for key, value in states[0].items() if value.is_floating_point()}
    for count, state in enumerate(states[1:], 1):
        weight = 1 / (count + 1) if decay is None else 1 - decay
        found = {key: (1 - weight) * value + weight * state[key].double() for key, value in found.items()}
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("decay", [None, 0.999])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_averaged_model_holds_the_average_of_the_masters(
    level: str, before: bool, decay: float | None, use_buffers: bool
) -> None:
    model = net()
    function = None if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
    optimizer = SGD(model.parameters(), lr=0.02)

    def make() -> swa_utils.AveragedModel:
        return swa_utils.AveragedModel(model, multi_avg_fn=function, use_buffers=use_buffers)

    average = make() if before else None
    xamp.initialize(model, optimizer, level, verbosity=0, keep_fp32=["2"])
    average = average or make()
    states = []
    for _ in range(6):
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        average.update_parameters(model)
        states.append(copy.deepcopy(model.state_dict()))
    expected = averaged(states, decay)
    for key, value in average.module.state_dict().items():
        if value.is_floating_point():
            wanted = expected[key] if use_buffers or "running" not in key else states[-1][key].double()
            assert value.dtype is torch.float32
            assert torch.allclose(value.double(), wanted, rtol=0, atol=1e-6), key
    twin = net()
    twin.load_state_dict(average.module.state_dict())
    if before or level in CAST:
        assert torch.equal(average.eval()(X), twin.eval()(X)), "it runs in fp32"
    assert average(X).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_an_averaged_model_is_resumed_exactly(level: str) -> None:
    """Into one that has had no update: it is made after ``initialize``, as a copy of the parameters."""
    averages = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = net()
        for param in model.parameters():
            nn.init.uniform_(param)
        xamp.initialize(model, SGD(model.parameters(), lr=0.02), level, verbosity=0, keep_fp32=["2"])
        averages.append(swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999)))
        state = averages[-1].module.state_dict()
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    old, new = averages
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert all(map(torch.equal, new.state_dict().values(), old.state_dict().values()))


def test_an_average_of_another_model_is_torchs() -> None:
    train(net(), "O5")
    model = net().to(torch.bfloat16)
    average = swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert average(X.bfloat16()).dtype is torch.bfloat16
