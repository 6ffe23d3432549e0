"""Pickles of managed models and optimizers: plain objects of their own classes, with exact fp32 weights.

Covers: xamp.sessions.pickles, xamp.values.own_hooks.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from forked_python import python
from one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import xamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LOWER = ("O2", "O3", "O5")
levels = pytest.mark.parametrize("level", LEVELS)
X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Weight(nn.Parameter):
    """A user's own class of parameters, whose pickle says so, as torch's own does not."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own, (self.detach().as_subclass(torch.Tensor), self.requires_grad)


def _own(values: torch.Tensor, trains: bool) -> Weight:
    made = Weight(values)
    made.requires_grad = trains
    return made


class Net(nn.Module):
    """Has parameters in lists, tied ones, one of a class of its own, one with an attribute, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.own = Weight(torch.linspace(0.1, 0.7, 4))
        self.register_buffer("table", torch.linspace(0.1, 0.7, 4))
        self.listed = [self.own]
        self.inner.weight.is_expert = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.norm(self.inner(x))) * self.listed[0] + self.table
        return self.rnn(x)[0]  # type: ignore[no-any-return]


def trained(level: str, make: Any = SGD, keep_fp32: Any = (), **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters(), lr=0.125, **options)
    xamp.initialize(model, optimizer, level, init_scale=64.0, keep_fp32=keep_fp32, verbosity=0)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    with xamp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


each_way = pytest.mark.parametrize("through", [through_pickle, through_torch], ids=["pickle", "torch.save"])


def states(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in found.items():
        assert value.dtype is expected[key].dtype, key
        assert torch.equal(value, expected[key]), key


def assert_is_plain(model: Any) -> None:
    assert type(model) is Net
    assert [type(part) for part in model.children()] == [nn.Linear, nn.BatchNorm1d, nn.GRU, nn.Linear]
    for module in model.modules():
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
        assert type(module._state_dict_hooks) is type(nn.Linear(1, 1)._state_dict_hooks)
    assert {value.dtype for value in (*model.parameters(), model.table)} == {torch.float32}
    assert model.tied.weight is model.inner.weight
    assert type(model.own) is Weight
    assert model.listed[0] is model.own
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0


# ---------------------------------------------------------------- models


@each_way
@levels
def test_a_model_and_its_parts_are_plain_and_exact(level: str, through: Callable[[Any], Any]) -> None:
    model, optimizer = trained(level, keep_fp32=["inner"] if through is through_torch else ())
    made = through(model)
    assert_is_plain(made)
    assert made.inner.weight.is_expert
    assert_same(states(made), states(model))
    assert made(X).dtype is torch.float32
    part = through(model.rnn)
    assert b"xamp" not in pickle.dumps(model.rnn)
    assert {p.dtype for p in part.parameters()} == {torch.float32}
    assert_same(states(part), states(model.rnn))
    alone = through(optimizer)
    assert type(alone) is SGD
    found = alone.param_groups[0]["params"]
    assert {p.dtype for p in found} == {torch.float32}
    for param, (name, _) in zip(found, model.named_parameters(), strict=True):
        assert torch.equal(param, model.state_dict()[name])
    file = io.BytesIO()
    torch.save(model.inner.bias, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), model.state_dict()["inner.bias"])
    xamp.session(model).close()
    assert_is_plain(through(model))


@pytest.mark.parametrize("level", LOWER)
def test_parameters_that_do_not_train_stay_so(level: str) -> None:
    model = Net()
    model.own.requires_grad_(False)
    xamp.initialize(model, level=level, verbosity=0)
    made = through_pickle(model)
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in model.parameters()]


@levels
def test_an_instance_attribute_that_hides_forward_is_as_before(level: str) -> None:
    model = Net()
    model.forward = model.forward  # type: ignore[method-assign]
    before = vars(model)["forward"]
    xamp.initialize(model, level=level, verbosity=0)
    model.eval()
    made = through_pickle(model)
    assert type(vars(made)["forward"]) is type(before)
    assert made.forward.__self__ is made
    twin = copy.deepcopy(model)
    assert twin(X).dtype is model(X).dtype


@pytest.mark.parametrize("level", LOWER)
def test_hooks_of_the_user_stay(level: str) -> None:
    model = Net()
    handle = model.register_state_dict_post_hook(_note)  # type: ignore[no-untyped-call]
    xamp.initialize(model, level=level, verbosity=0)
    assert list(through_pickle(model)._state_dict_hooks.values()) == [_note]
    handle.remove()
    assert not through_pickle(model)._state_dict_hooks
    xamp.session(model).close()
    assert not vars(model._state_dict_hooks)


def _note(*_: object) -> None:
    pass


@pytest.mark.parametrize("level", LOWER)
def test_a_deep_copy_stays_under_the_policy_and_its_pickle_is_plain(level: str) -> None:
    model, _ = trained(level)
    model.eval()
    twin = copy.deepcopy(copy.deepcopy(model))
    assert torch.equal(twin(X), model(X))
    assert twin.inner.weight.dtype is model.inner.weight.dtype
    made = through_pickle(twin)
    assert_is_plain(made)
    assert torch.equal(made.inner.weight, twin.inner.weight.float())
    assert through_pickle(twin.to(torch.float64)).inner.weight.dtype is torch.float64


@levels
def test_a_pickle_does_nothing_to_the_session(level: str) -> None:
    (model, optimizer), (other, twin) = trained(level), trained(level)
    held = [id(p) for p in model.parameters()]
    through_pickle((model, optimizer))
    through_torch(model)
    assert [id(p) for p in model.parameters()] == held
    for each, stepped in ((model, optimizer), (other, twin)):
        step(each, stepped)
    assert_same(states(model), states(other))


@levels
def test_a_model_in_ddp_is_plain_inside_of_it(level: str) -> None:
    model, _ = trained(level)
    with one_rank():
        wrapped: Any = DistributedDataParallel(model)
        wrapped(X).float().sum().backward()
        made = through_pickle(wrapped)
        assert type(made) is DistributedDataParallel
        assert_is_plain(made.module)
        assert_same(states(made.module), states(model))
        assert all(a is b for a, b in zip(made._module_parameters, made.module.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_compiled_ddp_has_no_hook_in_its_pickle(level: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    xamp.initialize(model, level=level, verbosity=0)
    with one_rank():
        wrapped: Any = DistributedDataParallel(model)
        compiled: Any = torch.compile(wrapped, backend="eager")
        compiled(X)
        assert wrapped._forward_pre_hooks
        assert not through_pickle(wrapped)._forward_pre_hooks
        assert b"xamp" not in pickle.dumps(wrapped)


# ---------------------------------------------------------------- models with their optimizers


@each_way
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@levels
def test_an_optimizer_holds_the_parameters_of_the_model_beside_it(
    level: str, order: str, through: Callable[[Any], Any]
) -> None:
    model, optimizer = trained(level, AdamW, eps=1e-3)
    pair = {"model": model, "optimizer": optimizer}
    made = through(pair if order == "model first" else dict(reversed(pair.items())))
    assert_is_plain(made["model"])
    found = made["optimizer"]
    assert type(found) is AdamW
    assert set(vars(found)) == set(vars(through_pickle(AdamW(Net().parameters()))))
    params = found.param_groups[0]["params"]
    assert [id(p) for p in params] == [id(p) for p in made["model"].parameters()]
    for param, live in zip(params, optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state[live].items():
            assert torch.equal(found.state[param][key], value.float()), key
            assert found.state[param][key].dtype is torch.float32
    made["model"](X).square().mean().backward()
    before = states(made["model"])
    found.step()
    assert not torch.equal(made["model"].inner.weight, before["inner.weight"])


@levels
def test_plain_training_goes_on_from_the_pickle(level: str) -> None:
    """Where nothing is rounded in between, as the session itself would: at O0. Elsewhere near to it."""
    model, optimizer = trained(level, SGD, momentum=0.5)
    made, plain = through_pickle((model, optimizer))
    step(model, optimizer)
    plain.zero_grad()
    made(X).square().mean().backward()
    plain.step()
    for value, expected in zip(made.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, expected.float(), rtol=0, atol=0 if level == "O0" else 2.0**-6)


# ---------------------------------------------------------------- other processes

READER = """
import sys
sys.modules["xamp"] = None
import torch
for level in {levels}:
    made = torch.load(f"{folder}/{{level}}.pt", weights_only=False)
    model, optimizer = made["model"], made["optimizer"]
    assert type(model) is torch.nn.Sequential and type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    weights = torch.load(f"{folder}/{{level}}-state.pt")
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
assert not [name for name in sys.modules if name.startswith("xamp.")]
print("loaded")
"""


def test_they_load_where_xamp_is_not_installed(tmp_path: Path) -> None:
    for level in LEVELS:
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = SGD(model.parameters(), lr=0.125, momentum=0.5)
        xamp.initialize(model, optimizer, level, verbosity=0)
        with xamp.scale_loss(model(torch.eye(3)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        torch.save({"model": model, "optimizer": optimizer}, tmp_path / f"{level}.pt")
        torch.save(model.state_dict(), tmp_path / f"{level}-state.pt")
    code = READER.format(levels=LEVELS, folder=tmp_path)
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=False, env=alone)
    assert done.stdout.strip() == "loaded", done.stderr


def answer(models: dict[str, Any], queue: Any, read: Any) -> None:
    """Runs in another process: says what it was given, and waits until that was read."""
    queue.put(
        {
            level: (type(model) is Net, {p.dtype for p in model.parameters()}, model.state_dict())
            for level, model in models.items()
        }
    )
    read.wait()


@pytest.mark.slow
def test_a_model_is_sent_to_another_process() -> None:
    models = {level: trained(level)[0] for level in LEVELS}
    context = mp.get_context("spawn")
    queue, read = context.Queue(), context.Event()
    process = context.Process(target=answer, args=(models, queue, read))
    process.start()
    found = queue.get(timeout=120)
    for level, (is_plain, dtypes, weights) in found.items():
        assert is_plain
        assert dtypes == {torch.float32}
        assert_same(weights, states(models[level]))
    read.set()
    process.join(timeout=120)
    assert process.exitcode == 0


# ---------------------------------------------------------------- what a session tells


def test_what_a_session_tells_of_its_steps_is_pickled() -> None:
    _, optimizer = trained("O2")
    session = xamp.session(optimizer)
    last_step, stats = through_pickle((session.last_step, session.stats))
    assert last_step is session.last_step
    assert (stats.applied, stats.skipped) == (2, 0)


def test_a_state_that_is_no_dict_is_pickled_as_it_is() -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O3", verbosity=0)
    optimizer.state[model.weight] = ["own"]
    assert list(pickle.loads(pickle.dumps(optimizer)).state.values()) == [["own"]]
