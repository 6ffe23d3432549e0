"""``initialize(backend="apex", delegate=True)``: a real ``apex.amp`` does the work, xamp's functions show it.

Covers: xamp.apex._delegate.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import BackendUnavailable, StateError, UnsupportedPolicy

STAND_IN = Path(__file__).parents[2] / "outside" / "apex"


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for a real Apex, installed."""
    monkeypatch.syspath_prepend(STAND_IN)
    yield __import__("apex.amp").amp
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def start(level: str = "O2", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    return xamp.initialize(model, optimizer, level, backend="apex", delegate=True, verbosity=0, **options)


def step(model: Any, optimizer: Any, seed: int, overflow: bool = False) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    with xamp.scale_loss(model(x).square().mean() * 2.0**-6, optimizer) as scaled:
        scaled.backward()
        if overflow:
            model.weight.grad.fill_(float("inf"))
    optimizer.step()


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in xamp.master_params(optimizer)]


def test_the_real_one_trains(apex: Any) -> None:
    model, optimizer = start()
    assert model.weight.dtype == torch.float16
    assert xamp.session(model).last_step is None
    seen = []
    for seed in range(6):
        before = masters(optimizer)
        step(model, optimizer, seed, overflow=seed == 3)
        seen.append((xamp.session(optimizer).last_step, xamp.loss_scale(model)))
        if seed == 3:
            assert all(map(torch.equal, masters(optimizer), before))
    applied, skipped = xamp.StepOutcome.APPLIED, xamp.StepOutcome.SKIPPED
    assert seen == [(applied, 2.0**16)] * 3 + [(skipped, 2.0**15)] + [(applied, 2.0**15)] * 2
    stats = xamp.session(model).stats
    assert (stats.applied, stats.skipped) == (5, 1)
    assert apex._amp_state.loss_scalers[0].loss_scale() == 2.0**15
    assert "_xamp" not in vars(optimizer), "nothing of xamp's own runs its steps"


def test_a_checkpoint_has_its_masters_and_scales(apex: Any) -> None:
    model, optimizer = start()
    for seed in range(4):
        step(model, optimizer, seed, overflow=seed == 1)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), xamp.state_dict(model)], file)
    for seed in range(4, 8):
        step(model, optimizer, seed)
    file.seek(0)
    of_model, of_optimizer, of_xamp = torch.load(file, weights_only=True)
    other, again = start()
    other.load_state_dict(of_model)
    xamp.load_state_dict(of_xamp, other)
    again.load_state_dict(of_optimizer)
    assert xamp.loss_scale(other) == 2.0**15
    for seed in range(4, 8):
        step(other, again, seed)
    assert all(map(torch.equal, masters(again), masters(optimizer)))
    assert apex._amp_state.loss_scalers[0]._unskipped == 6


def test_its_state_loads_into_xamps_own(apex: Any) -> None:
    model, optimizer = start()
    step(model, optimizer, 0)
    saved, exact = xamp.state_dict(model), masters(optimizer)
    plain = nn.Linear(4, 1)
    own = torch.optim.SGD(plain.parameters(), lr=0.0625, momentum=0.5)
    xamp.initialize(plain, own, "O2", verbosity=0)
    xamp.load_state_dict(saved, plain)
    assert all(map(torch.equal, masters(own), exact))
    assert xamp.loss_scale(plain) == 2.0**16


def test_what_it_refuses_is_named(apex: Any) -> None:
    with pytest.raises(UnsupportedPolicy, match=r"the real apex\.amp refuses: Unexpected optimization level O1"):
        start("O1")
    with pytest.raises(UnsupportedPolicy, match=r"growth_interval=\.\.\.\): the real apex\.amp has no such setting"):
        start(growth_interval=5)
    with pytest.raises(UnsupportedPolicy, match="keep_fp32 and methods out"):
        start(keep_fp32=[nn.Linear], methods=("forward", "extra_repr"))


def test_it_cannot_be_closed(apex: Any) -> None:
    model, optimizer = start()
    with pytest.raises(StateError, match="cannot take them out again"):
        xamp.session(model).close()
    step(model, optimizer, 0)


@pytest.mark.parametrize("options", [{"backend": "apex", "delegate": True}, {}])
@pytest.mark.parametrize("trained", [True, False])
def test_what_a_real_one_has_is_not_initialized_again(apex: Any, options: dict[str, Any], trained: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    xamp.initialize(model, optimizer if trained else None, level="O2", backend="apex", delegate=True, verbosity=0)
    for again in (optimizer, torch.optim.SGD(model.parameters(), lr=0.5)):
        with pytest.raises(
            StateError, match=r"this Linear was given to initialize before, and a real apex\.amp has it"
        ):
            xamp.initialize(model, again, level="O2", verbosity=0, **options)
    if trained:
        step(model, optimizer, 0)
        assert xamp.session(model).stats.applied == 1


def test_none_is_there() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    before = copy.deepcopy(model)
    with pytest.raises(BackendUnavailable, match="no package named apex is installed"):
        xamp.initialize(model, level="O2", backend="apex", delegate=True, verbosity=0)
    assert type(model) is nn.Linear
    assert torch.equal(model.weight, before.weight)


def test_one_that_does_not_import_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "amp.py").write_text("import torch._six\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"does not import on torch .*torch\._six"):
        xamp.initialize(nn.Linear(4, 1), level="O2", backend="apex", delegate=True, verbosity=0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def test_other_backends_have_nothing_to_hand_over_to() -> None:
    with pytest.raises(UnsupportedPolicy, match="has nothing to hand over to"):
        xamp.initialize(nn.Linear(4, 1), level="O2", delegate=True, verbosity=0)
