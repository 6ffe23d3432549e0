"""Where a step cannot be taken in one pass after all, the user is told, once; and it is right as torch takes it.

Covers: xamp.plans.layouts, xamp.plans.available, xamp.scaling.one_pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_pass_loops import AS_TORCH, IN_ONE_PASS, Loop
from torch import nn

import xamp
from xamp import onepass
from xamp.errors import UnsupportedPolicy
from xamp.plans import available, lists
from xamp.plans.layouts import refusal

pytestmark = pytest.mark.usefixtures("interpreter")

AFAR = torch.ones((), device="meta")


def convolution(fused: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    xamp.initialize(model, optimizer, "O2", fused=fused, verbosity=0, init_scale=2.0**8)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_strides_that_changed_after_initialize_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The steps go on as torch takes them, with the numbers that they had."""
    pairs = [convolution(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for model, optimizer in pairs:
        train(model, optimizer, 2)
        assert not caplog.records
        model.to(memory_format=torch.channels_last)
    for model, optimizer in pairs:
        train(model, optimizer, 3)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "AdamW does not step in one pass now, as fused='one-pass' asks, but as torch steps it" in record.getMessage()
    assert "strides" in record.getMessage()
    ours, theirs = ([p.detach().float() for p in model.parameters()] for model, _ in pairs)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("betas", (0.9, AFAR), r"betas is a tensor in torch.float32 on meta"),
        ("lr", AFAR.half(), r"lr is a tensor in torch.float16 on meta"),
        ("eps", AFAR, r"eps is a tensor"),
    ],
)
def test_options_that_would_be_waited_for_are_named(option: str, value: Any, said: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert refusal(torch.optim.AdamW, optimizer) == ""
    optimizer.param_groups[0][option] = value
    with pytest.raises(UnsupportedPolicy, match=f"AdamW cannot step in one pass: {said}.*kernels read lr there"):
        xamp.initialize(model, optimizer, "O2", fused="one-pass", verbosity=0)
    assert model.weight.dtype == torch.float32


def test_an_option_that_becomes_one_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """At O2 after a backward; at O5, where nothing is checked, at the step."""
    for level in ("O2", "O5"):
        loop = Loop(IN_ONE_PASS, level).run(range(2))
        loop.optimizer.zero_grad()
        loop.optimizer.param_groups[0]["dampening"] = AFAR  # which AdamW has not, and torch does not read
        caplog.clear()
        for _ in range(2):
            loop.iterate()
        (record,) = caplog.records
        assert "dampening is a tensor in torch.float32 on meta" in record.getMessage()


def test_a_rate_and_a_count_on_the_device_are_read_there() -> None:
    group = {"lr": torch.tensor(0.5), "step": torch.tensor(3, dtype=torch.int32), "betas": (0.9, torch.tensor(0.99))}
    assert onepass.rules.unread(group, torch.device("cpu")) == ""


@pytest.fixture
def device_of_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host passes for a device for which Triton compiles, with kernels that are wrong."""
    monkeypatch.setattr(available, "_own", lambda: "cpu")
    monkeypatch.setattr(lists, "_on_host", True)
    monkeypatch.setattr(available, "_defect", lambda device, rule: f"{rule} is wrong")
    for cached in (lists._refusal, lists._tell):
        cached.cache_clear()
    yield
    for cached in (lists._refusal, lists._tell):
        cached.cache_clear()


def steps_of_adam(count: int) -> torch.Tensor:
    from xamp.apex.optimizers import FusedAdam

    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.5)
    for _ in range(count):
        param.grad = torch.ones(3)
        optimizer.step()
    return param.detach()


@pytest.mark.usefixtures("device_of_triton")
def test_lists_that_should_be_one_pass_and_are_not_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert bool((steps_of_adam(2) < 1.0).all())
    steps_of_adam(1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("steps by adam on cpu are taken by torch's operators and not in one pass")
    assert record.getMessage().endswith("which is slower: adam is wrong")


@pytest.mark.usefixtures("device_of_triton")
def test_a_device_that_triton_does_not_know_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(available, "_own", lambda: "another")
    steps_of_adam(1)
    assert not caplog.records
    assert not available.expects("cpu")


@pytest.mark.usefixtures("device_of_triton")
def test_a_rule_that_is_wrong_alone_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(available, "_defect", lambda device, rule: "wrong" if rule == "lamb" else "")
    grads, params, *moments = ([torch.ones(3)] for _ in range(4))
    numbers = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    assert lists.prepared(onepass.Rule("lamb"), [grads, params, *moments], numbers) is None
    assert lists.prepared(onepass.Rule("adam"), [grads, params, *moments], numbers) is not None
    (record,) = caplog.records
    assert "steps by lamb on cpu" in record.getMessage()
    assert lists.prepared(onepass.Rule("adam"), [grads, params, *moments], numbers | {"eps": AFAR}) is None
    assert "steps by adam on cpu" in caplog.records[-1].getMessage()
    assert "eps is a tensor" in caplog.records[-1].getMessage()


def test_triton_is_there_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "_own", lambda: "cpu")
    assert available.expects("cpu")
    assert not available.expects("meta")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not available.expects("cpu")
