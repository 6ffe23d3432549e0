"""Which rules a device runs: each is tried once a process, and what a compiler says is told.

Covers: xamp.plans.available.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import xamp
from xamp.errors import UnsupportedPolicy
from xamp.onepass import Plan, Row, Rule, kernels
from xamp.plans import available


@pytest.fixture(autouse=True)
def _untried() -> Iterator[None]:
    available._defect.cache_clear()
    yield
    available._defect.cache_clear()


class Broken:
    """In the place of a kernel: a compiler that refuses it."""

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("unsupported: fp64")


@pytest.mark.parametrize("rule", ["sgd", "adam", "adagrad", "lamb", "novograd"])
def test_kernels_that_are_right_are_taken_for_each_rule(rule: str) -> None:
    assert available.refusal("cpu") == ""
    moving = torch.zeros(()) if rule == "novograd" else torch.zeros(3)
    states = (torch.zeros(3), moving)[: {"sgd": 0, "adagrad": 1}.get(rule, 2)]
    assert type(available.plan(Rule(rule), [Row(torch.zeros(3), None, states)])) is Plan


def test_each_rule_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(torch.zeros(3), None, (torch.zeros(3), torch.zeros(3)))]
    monkeypatch.setattr(kernels, "by_row", Broken())
    assert type(available.plan(Rule("adam"), rows)) is Plan
    with pytest.raises(ValueError, match=r"no kernels: Triton does not compile for this device: .*unsupported: fp64"):
        available.plan(Rule("lamb"), rows)


def test_kernels_that_are_wrong_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "step", lambda self, *_: None)  # nothing is stepped
    assert available.refusal("cpu") == "a kernel of Triton's gives a wrong result here"
    with pytest.raises(ValueError, match="no kernels: a kernel of Triton's gives a wrong result here"):
        available.plan(Rule("sgd"), [Row(torch.zeros(3))])


@pytest.mark.parametrize(("by", "is_right"), [(0.5e-5, True), (1.5e-5, False), (-1.5e-5, False)])
def test_a_step_may_differ_by_1e_5_and_no_more(by: float, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Plan, *args: Any) -> None:
        own(self, *args)
        for row in self.rows:
            row.param.add_(by)

    own = Plan.step
    monkeypatch.setattr(Plan, "step", step)
    assert (available.refusal("cpu") == "") == is_right


def test_a_pass_that_was_asked_for_is_refused_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed then, and the default trains."""
    monkeypatch.setattr(kernels, "step", Broken())
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    words = r"fused='one-pass'.*: AdamW cannot step in one pass: Triton does not compile for this device: .*unsupported"
    with pytest.raises(UnsupportedPolicy, match=words + r".*Leave fused='auto'"):
        xamp.initialize(model, optimizer, "O2", fused="one-pass", verbosity=0)
    assert model.weight.dtype == torch.float32
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    with xamp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_interpreted_kernels_never_get_a_devices_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter runs on the host, where they lie in nobody's memory."""
    assert "TRITON_INTERPRET=1 lets kernels run on the host" in available.refusal("meta")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(available, "_own", lambda: "no device")
    assert available.refusal("meta") == "Triton compiles for no device here"
