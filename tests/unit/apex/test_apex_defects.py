"""The defects of Apex that are repaired, each with what Apex did; those of its casts are in test_apex_o1_casts.py.

Covers: xamp.apex._frontend, xamp.apex._engine, xamp.apex._start, xamp.apex._scale_loss, xamp.apex._legacy.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp.apex import amp
from xamp.apex._handle import AmpHandle
from xamp.apex._legacy import OptimWrapper
from xamp.errors import StateError


def start(lane: Lane, level: str = "O2", seed: int = 0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    options.setdefault("verbosity", 0)
    amp.initialize(model, optimizer, opt_level=level, **options)
    return model, optimizer


def batch(lane: Lane, seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).to(lane.device)


def backward(model: Any, optimizers: Any, x: torch.Tensor, overflow: bool = False, **options: Any) -> None:
    """One backward; an overflow is made by a gradient that fp16 and fp32 both lose."""
    loss = model(x).square().mean()
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        (scaled * (1e38 if overflow else 1.0)).backward()


def train(model: Any, optimizer: Any, lane: Lane, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, optimizer, batch(lane, step), overflow=lane.can.overflow == "inf" and step % 7 == 3)
        optimizer.step()


def weights(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in amp.master_params(optimizer)]


# ---------------------------------------------------------------- 4: checkpoints


ORDERS = ["initialize model optimizer amp", "initialize optimizer amp model", "model initialize optimizer amp"]


@pytest.mark.parametrize("order", ORDERS)
def test_o2_goes_on_from_a_checkpoint_bit_for_bit(lane: Lane, order: str) -> None:
    """Apex saved the fp16 weights in fp32 and no masters: every resume rounded them, and a load after the first
    backward was undone by the next step."""
    model, optimizer = start(lane)
    train(model, optimizer, lane, range(10))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
    train(model, optimizer, lane, range(10, 20))

    file.seek(0)
    saved = dict(zip(("model", "optimizer", "amp"), torch.load(file, weights_only=True), strict=True))
    torch.manual_seed(1)
    other: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(lane.device)
    again = torch.optim.SGD(other.parameters(), lr=0.0625, momentum=0.5)
    for word in order.split():
        if word == "initialize":
            amp.initialize(other, again, opt_level="O2", verbosity=0)
        else:
            {"model": other, "optimizer": again, "amp": amp}[word].load_state_dict(saved[word])
    train(other, again, lane, range(10, 20))
    assert all(map(torch.equal, weights(again), weights(optimizer)))


def test_a_model_loaded_in_the_middle_counts(lane: Lane) -> None:
    """In Apex the next step wrote the masters, which the load had not reached, over what was loaded."""
    model, optimizer = start(lane)
    train(model, optimizer, lane, range(3))
    wanted = {key: torch.full_like(value, 0.25) for key, value in model.state_dict().items()}
    model.load_state_dict(wanted)
    assert all(bool((w == 0.25).all()) for w in weights(optimizer))
    optimizer.zero_grad()
    backward(model, optimizer, batch(lane))
    optimizer.step()
    assert all(bool((p.detach().float() - 0.25).abs().max() < 0.2) for p in model.parameters())


# ---------------------------------------------------------------- 6: containers


@pytest.mark.parametrize("kind", [list, tuple])
def test_optimizers_in_a_tuple_accumulate_as_in_a_list(lane: Lane, kind: type) -> None:
    """Apex looked for a list: with a tuple the gradients of earlier losses were unscaled a second time."""
    model, optimizer = start(lane, "O0", loss_scale=128.0)
    plain = copy.deepcopy(model)
    for seed in range(3):
        backward(model, kind([optimizer]), batch(lane, seed))
        plain(batch(lane, seed)).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# ---------------------------------------------------------------- 7: state of the process


def test_a_second_initialize_leaves_the_first_its_scales(lane: Lane) -> None:
    """Apex had one list of scales: the second call replaced it, and a loss_id of the first was out of range."""
    model, optimizer = start(lane, num_losses=2)
    scaler = amp._amp_state.loss_scalers[1]
    scaler._loss_scale = 64.0
    start(lane, "O2", seed=1)
    loss = model(batch(lane)).square().mean()
    with amp.scale_loss(loss, optimizer, loss_id=1) as scaled:
        assert scaled.item() == pytest.approx(64.0 * loss.item())
        scaled.backward()
    assert scaler.loss_scale() == 64.0
    assert len(amp._amp_state.loss_scalers) == 1


def test_a_level_without_patches_is_not_patched_after_one_with(lane: Lane) -> None:
    """Apex's patches stayed: a model at O0, O2 or O3 ran with the casts of an earlier O1."""
    mm, x = torch.mm, batch(lane)
    first, optimizer = start(lane, "O1", loss_scale=64.0)
    model, _ = start(lane, "O0", seed=1)
    seen = []
    for each in (first, model):
        each[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
        each(x)
    assert seen == [torch.float16, torch.float32], "each model means its own level"
    train(first, optimizer, lane, range(2))
    del first, optimizer, model, each, _
    gc.collect()
    start(lane, "O2", seed=3)
    assert torch.mm is mm, "the models that wanted patches are gone"


def test_two_calls_at_o1_share_the_patches(lane: Lane) -> None:
    """Steps of either run without casts, and each loss drops the casts of weights that the other's functions made."""
    x = batch(lane)
    model, optimizer = start(lane, "O1", loss_scale=64.0)
    other, _ = start(lane, "O1", seed=1, loss_scale=64.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *args: seen.append(torch.mm(x, x.T).dtype))
    backward(model, optimizer, x)
    handle = amp._amp_state.handle
    assert isinstance(handle, AmpHandle)
    assert not handle.cache
    optimizer.step()
    assert seen == [torch.float32]
    xamp.session(other).close()
    with amp.disable_casts():
        assert torch.mm(x, x.T).dtype == torch.float32
    xamp.session(model).close()


def test_what_cannot_be_patched_changes_nothing(lane: Lane) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    amp.register_half_function(int, "bit_length")
    before = torch.mm, amp._amp_state.handle
    with pytest.raises((TypeError, AttributeError)):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert (torch.mm, amp._amp_state.handle) == before
    assert type(optimizer) is torch.optim.SGD
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    xamp.session(model).close()


def test_a_model_goes_with_its_parameters(lane: Lane) -> None:
    for level in ("O0", "O1", "O2"):
        model, optimizer = start(lane, level)
        backward(model, optimizer, batch(lane))
        held = weakref.ref(model[0].weight), weakref.ref(next(amp.master_params(optimizer)))
        del model, optimizer
        gc.collect()
        assert [ref() for ref in held] == [None, None]


def test_a_level_is_not_changed_in_silence(lane: Lane) -> None:
    model, _ = start(lane, "O0")
    for again in (model, copy.deepcopy(model)):
        with pytest.raises(StateError, match="runs under another policy"):
            amp.initialize(again, opt_level="O2", verbosity=0)
    assert amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O0", verbosity=0)[0] is model


def test_an_evaluation_leaves_no_casts_behind(lane: Lane) -> None:
    """Under inference_mode they could not be saved for backward; written through ``.data``, weights were stale."""
    model, optimizer = start(lane, "O1", loss_scale=64.0)
    model[0].weight.requires_grad_(False)
    x = batch(lane)
    with torch.inference_mode():
        model(x)
    backward(model, optimizer, x)
    optimizer.step()
    with torch.no_grad():
        before = model(x)
        model[2].weight.data.copy_(torch.zeros_like(model[2].weight))
        assert not torch.equal(model(x), before)
    xamp.session(model).close()


def test_the_policy_as_a_block_is_what_is_around(lane: Lane) -> None:
    model, _ = start(lane, "O1")
    x = batch(lane)
    with xamp.session(model).autocast():
        assert torch.mm(x, x.T).dtype == torch.float16
    xamp.session(model).close()


def test_sessions_of_xamp_and_of_apex_do_not_touch_each_other(lane: Lane) -> None:
    model, optimizer = start(lane, "O1")
    torch.manual_seed(1)
    other = nn.Linear(4, 4).to(lane.device)
    xamp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.5), level="O0", verbosity=0)
    x = batch(lane)
    assert torch.mm(x, x.T).dtype == torch.float16
    seen = []
    other.register_forward_hook(lambda *args: seen.append(torch.mm(x, x.T).dtype))
    other(x)
    assert other(x).dtype == torch.float32
    amp._amp_state.loss_scalers[0]._loss_scale = 256.0
    backward(model, optimizer, x)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 256.0
    assert xamp.loss_scale(other) == 1.0
    handle = amp._amp_state.handle
    assert handle is not None
    handle._deactivate()


# ---------------------------------------------------------------- 8: the model stays itself


def test_copies_run_their_own_weights_and_pickle(lane: Lane) -> None:
    """Apex put a closure over the original's forward into the model: a copy ran the original's weights, and none could
    be pickled."""
    model, _ = start(lane)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    x = batch(lane)
    assert not bool(twin(x).any())
    assert bool(model(x).any())
    again = pickle.loads(pickle.dumps(model))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())


class Batch:
    """What Apex's documentation asks of a batch of one's own."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.values.to(dtype))


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, batch: Batch, wide: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(batch.values) + self.inner(wide)
        return found


def test_what_can_cast_itself_does(lane: Lane) -> None:
    """As in Apex, and float64 is cast too."""
    model: Any = amp.initialize(OfBatches().to(lane.device), opt_level="O3", verbosity=0)
    wide = batch(lane) if lane.device.type == "mps" else batch(lane).double()
    assert model(Batch(batch(lane)), wide).dtype == torch.float32


# ---------------------------------------------------------------- 9: switched off


def test_a_script_that_saves_runs_switched_off_too(lane: Lane) -> None:
    """``amp.state_dict()`` was an AttributeError in Apex after ``initialize(enabled=False)``."""
    model, optimizer = start(lane, enabled=False)
    loss = model(batch(lane)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    amp.load_state_dict(amp.state_dict())
    assert amp.state_dict() == {}


# ---------------------------------------------------------------- 11: the oldest API


def plain_steps(lane: Lane, losses: int, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=64.0, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(losses):
            (model(batch(lane, step + index)).square().mean() * 2.0**-10).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("losses", [1, 2])
def test_a_wrapped_optimizer_trains(lane: Lane, losses: int) -> None:
    """``handle.wrap_optimizer`` raised in every backward of the last Apex: "a leaf Variable that requires grad ..."."""
    handle = amp.init(enabled=True)
    try:
        with handle._disable_casts():
            torch.manual_seed(0)
            model = nn.Linear(4, 1).to(lane.device)
        wrapped = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=64.0, momentum=0.5), num_loss=losses)
        assert isinstance(wrapped, OptimWrapper)
        for step in range(4):
            wrapped.zero_grad()
            for index in range(losses):
                out = nn.functional.linear(batch(lane, step + index), model.weight, model.bias)
                with wrapped.scale_loss(out.float().square().mean() * 2.0**-10) as scaled:  # so that fp16 holds it
                    scaled.backward()
            wrapped.step()
    finally:
        handle._deactivate()
    torch.testing.assert_close([*model.parameters()], plain_steps(lane, losses, 4), rtol=5e-3, atol=5e-3)


def test_a_handle_scales_losses(lane: Lane) -> None:
    """``handle.scale_loss`` always raised "The old Amp API is no longer supported"."""
    handle = amp.init()
    try:
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(lane.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(batch(lane)).float().square().mean() * 2.0**-10
            with handle.scale_loss(loss, optimizer) as scaled:
                assert scaled.item() == pytest.approx(2.0**16 * loss.item())
                scaled.backward()
            optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))
    finally:
        handle._deactivate()


# ---------------------------------------------------------------- what only looks like an optimizer


class Around:
    """A wrapper with an optimizer's methods, as apex.parallel.LARC is one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        self.param_groups = optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optim.state

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    def step(self) -> None:
        self.optim.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_wrapper_around_an_optimizer_trains(lane: Lane, level: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1).to(lane.device)
    plain = copy.deepcopy(model)
    wrapper: Any = Around(torch.optim.SGD(model.parameters(), lr=0.0625))
    amp.initialize(model, wrapper, opt_level=level, verbosity=0, loss_scale=16.0)
    backward(model, wrapper, batch(lane))
    wrapper.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0625)
    plain(batch(lane)).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(
        [v.detach().float() for v in model.parameters()], [*plain.parameters()], rtol=2e-3, atol=2e-3
    )
    xamp.session(model).close()


# ---------------------------------------------------------------- what Apex let pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_scale": 0}, "loss_scale=0 "),
        ({"loss_scale": "0"}, "loss_scale='0' "),
        ({"loss_scale": 1e-46}, "loss_scale=1e-46 "),
        ({"loss_scale": 1e39}, "loss_scale=1e+39 "),
        ({"loss_scale": float("inf")}, "loss_scale=inf "),
        ({"loss_scale": "nan"}, "loss_scale='nan' "),
        ({"num_losses": -1}, "num_losses=-1 "),
        ({"num_losses": "3"}, "num_losses='3' "),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(lane: Lane, options: dict[str, Any], named: str) -> None:
    """A scale of 0 made every weight nan."""
    model = nn.Linear(4, 1).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = type(model), type(optimizer), model.weight.dtype
    with pytest.raises((TypeError, ValueError), match=re.escape(named)):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
    assert (type(model), type(optimizer), model.weight.dtype) == before


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_of_the_block_is_told_of(lane: Lane, level: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start(lane, level)
    with caplog.at_level(logging.WARNING, "xamp"):
        for _ in range(2):
            with amp.scale_loss(model(batch(lane)).square().mean(), optimizer) as scaled:
                scaled.backward()
                optimizer.step()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "SGD.step() inside of `with amp.scale_loss(...)`"
    ]
    xamp.session(model).close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_not_finite_is_named_when_no_scale_helps(lane: Lane, level: str) -> None:
    if lane.can.overflow == "flag":
        pytest.skip("a flag does not say whose gradient overflowed")
    model, optimizer = start(lane, level, min_loss_scale=2.0**16)

    def train_on() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            backward(model, optimizer, batch(lane), overflow=True)
            optimizer.step()

    with pytest.raises(xamp.LossScaleCollapsed, match=r"not finite: 0\.weight, 0\.bias, 2\.weight"):
        train_on()
    if level == "O2":
        assert all(p.grad is None for p in amp.master_params(optimizer))
    xamp.session(model).close()
