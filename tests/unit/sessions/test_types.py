"""What mypy and pyright know of the public calls: `mypy --strict tests`, which ci/lint.sh runs, checks this file.

A wrong call that were none to mypy would be an unused `type: ignore`, which is an error too. `ci/node.sh pyright`,
which ci/lint.sh runs too, asks pyright the same.

Covers: xamp.sessions.initialize, xamp.sessions.session.
"""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import xamp
from xamp.policy import LEVELS
from xamp.sessions.formats import SavedOptimizer, SavedScaler, SessionState
from xamp.sessions.initialize import LevelName, Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import assert_type

    class Net(nn.Module):
        depth: int

    def right(net: Net, other: nn.Linear, adam: Adam, sgd: SGD, level: str, maybe: Adam | None, config: Any) -> None:
        assert_type(xamp.initialize(net, adam), tuple[Net, Adam])
        assert_type(xamp.initialize(net, adam, "O2"), tuple[Net, Adam])
        assert_type(xamp.initialize(net), Net)
        assert_type(xamp.initialize(net, None, "O5", keep_fp32=[nn.LayerNorm]), Net)
        assert_type(xamp.initialize([net, net], [adam, adam], level="O1"), tuple[list[Net], list[Adam]])
        assert_type(xamp.initialize((net, other), (adam, sgd)), tuple[tuple[Net, nn.Linear], tuple[Adam, SGD]])
        assert_type(xamp.initialize([net, other], adam)[1], Adam)
        assert_type(xamp.initialize(net, [adam, sgd])[0], Net)
        assert_type(xamp.initialize([net]), list[Net])
        assert_type(xamp.initialize(net, maybe), Net | tuple[Net, Adam])
        assert_type(xamp.initialize(net, adam, level=level, op_policy=level), tuple[Net, Adam])
        assert_type(xamp.initialize(net, adam, config.level, verbosity=0, loss_scale="dynamic"), tuple[Net, Adam])
        xamp.initialize(net, adam, opt_level="O2", loss_scale=128.0, dtype=torch.bfloat16, process_group=config)
        (a, b), (c, d) = xamp.initialize([net, net], [adam, adam], "O1")
        assert_type((a, b, c, d), tuple[Net, Net, Adam, Adam])
        (a, b), (c, d) = xamp.initialize((net, net), (adam, adam), "O1")
        (generator, _), both = xamp.initialize([net, other], adam)
        generator.eval(), both.step()
        [net], [adam] = xamp.initialize([net], [adam])
        net, [adam] = xamp.initialize(net, [adam])
        net, adam = xamp.initialize(net, adam)
        assert_type(net.depth, int)
        outcome = xamp.session(adam).last_step
        assert_type(outcome, xamp.StepOutcome | dict[Optimizer, xamp.StepOutcome | None] | None)
        state = xamp.state_dict(adam)
        assert_type(state["scalers"][0]["scale"], float)
        assert_type(state["masters"], list[dict[str, torch.Tensor]])
        assert_type(xamp.session(net).state_dict()["level"], str)
        assert_type(xamp.state_dict(adam, "torch"), Any)
        assert_type(xamp.state_dict(format="torch_npu"), Any)
        xamp.load_state_dict(state, net)
        assert_type(xamp.clip_grad_norm_([adam, sgd], 1.0, error_if_nonfinite=True), torch.Tensor)

    def wrong(net: Net, adam: Adam) -> None:
        xamp.initialize(net, "O1")  # type: ignore[type-var]
        xamp.initialize(net.parameters(), adam)  # type: ignore[call-overload]
        xamp.initialize(adam)  # type: ignore[call-overload]
        xamp.initialize(net, adam, 2)  # type: ignore[call-overload]
        xamp.initialize(net, adam, "O1", nonsense=1)  # type: ignore[call-overload]
        xamp.initialize(net, adam, init_scale="large")  # type: ignore[call-overload]
        xamp.initialize(net, adam).step()  # type: ignore[attr-defined]
        xamp.initialize(net, adam)[1].nonsense()  # type: ignore[attr-defined]
        _ = xamp.session(adam).last_step.name  # type: ignore[union-attr]
        xamp.state_dict(adam)["mistress"]  # type: ignore[typeddict-item]
        xamp.clip_grad_value_(adam)  # type: ignore[call-arg]
        xamp.intialize(net, adam)  # type: ignore[attr-defined]


def test_the_arguments_in_the_types_are_those_of_initialize() -> None:
    named = [name for name, each in inspect.signature(xamp.initialize).parameters.items() if each.kind == 3]
    assert sorted(Settings.__annotations__) == sorted(named)
    spelt = {"auto", "fp8", "amp-fp8", *(name for row in LEVELS.values() for name in (row.name, *row.aliases))}
    assert set(get_args(LevelName)) == spelt


def test_a_saved_state_is_as_its_type_says() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    state = xamp.state_dict(optimizer)
    assert set(state) == set(SessionState.__annotations__) - {"fp8"}  # of a session that has it
    assert set(state["scalers"][0]) == set(SavedScaler.__annotations__)
    assert set(state["optimizers"][0]) == set(SavedOptimizer.__annotations__)
    xamp.session(model).close()


def test_session_prints_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", init_scale=1024.0, verbosity=0)
    assert repr(xamp.session(model)) == (
        "<xamp session: level O2 on cpu, SGD, loss scale 1024 (dynamic), steps: 0 applied, 0 skipped>"
    )
    for value in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.ones(3, 2)).sum() * value, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert repr(xamp.session(optimizer)) == (
        "<xamp session: level O2 on cpu, SGD, loss scale 512 (dynamic), steps: 2 applied, 1 skipped>"
    )
    xamp.session(model).close()
    other = nn.Linear(2, 1)
    xamp.initialize(other, level="O5", verbosity=0)
    assert "level O5 on cpu, no optimizer, loss scale 1 (static)" in repr(xamp.session(other))
    xamp.session(other).close()
    xamp.initialize(other, enabled=False)
    assert repr(xamp.session(other)) == "<xamp session: disabled, on cpu>"


def test_the_repr_of_a_session_whose_optimizer_is_gone() -> None:
    model = nn.Linear(2, 1)
    xamp.initialize(model, SGD(model.parameters(), lr=0.1), "O2", verbosity=0)
    gc.collect()
    assert "level O2 on cpu, no optimizer, loss scale 65536 (dynamic)" in repr(xamp.session(model))
