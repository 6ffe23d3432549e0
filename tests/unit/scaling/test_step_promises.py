"""Promises of a step that only one line of code keeps: each test is the one that sees that line missing.

Covers: xamp.scaling.engine, xamp.scaling.gradients, xamp.scaling.step.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from stepping import Dot, assert_follows, plain_iterate, run_backward, twin
from torch.optim import SGD, Optimizer

import xamp

X = torch.tensor([0.5, -0.25, 1.0, 0.125, -0.75, 0.375, -1.0])
WITH_MASTERS = ("O2", "O5")


class Whole(SGD):
    """An optimizer whose pickles hold all of its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def started(level: str, make: type[Optimizer] = SGD, **options: Any) -> tuple[Any, Any]:
    model: Any = Dot()
    optimizer: Any = make(model.parameters(), lr=0.125)  # type: ignore[call-arg]
    xamp.initialize(model, optimizer, level, verbosity=0, **{"init_scale": 64.0, **options})
    return model, optimizer


def gradients(optimizer: Optimizer) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for group in optimizer.param_groups for p in group["params"]]


def test_a_half_loss_with_a_dimension_is_scaled_in_fp32() -> None:
    """torch would multiply it in fp16, for a number does not widen a tensor that has a dimension."""
    model, optimizer = started("O1", init_scale=65536.0)
    loss = (model(X) * 0 + 3.0).half().reshape(1)
    with xamp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.item() == 3.0 * 65536.0


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_what_is_written_into_a_state_dict_after_the_forward_counts(level: str) -> None:
    model, optimizer = started(level)
    loss = model(X)
    for value in model.state_dict().values():
        value.fill_(0.5)
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    for tensor in (*xamp.master_params(optimizer), *model.parameters()):
        assert bool((tensor == 0.5).all())


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_gradients_cleared_by_hand_after_a_group_was_added_are_cleared(level: str) -> None:
    model, optimizer = started(level)
    run_backward(model(X), optimizer)
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    for param in model.parameters():
        param.grad = None
    run_backward(model(2 * X), optimizer)
    found = [p.grad for p in itertools.islice(xamp.master_params(optimizer), 2) if p.grad is not None]
    assert torch.equal(torch.cat(found), 2 * X)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_pickle_of_all_attributes_has_nothing_of_xamp(level: str) -> None:
    _, optimizer = started(level, Whole)
    copied = copy.deepcopy(optimizer)
    assert type(copied) is Whole
    assert "_xamp" not in vars(copied)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_momentum_of_before_initialize_goes_on(level: str) -> None:
    model: Any = Dot()
    reference = twin(model)
    under, plain = (SGD(m.parameters(), lr=0.125, momentum=0.5) for m in (model, reference))
    for each, steps in ((model, under), (reference, plain)):
        plain_iterate(each, steps, X)
    xamp.initialize(model, under, level, verbosity=0, init_scale=64.0)
    under.zero_grad()
    run_backward(model(X), under)
    under.step()
    plain_iterate(reference, plain, X)
    assert_follows(under, reference)


def test_two_optimizers_may_come_to_share_a_parameter_where_nothing_is_scaled() -> None:
    model: Any = Dot()
    made: Any = [SGD([model.a], lr=0.125), SGD([model.b], lr=0.125)]
    xamp.initialize(model, made, level="O0", verbosity=0)
    made[1].add_param_group({"params": [model.a]})
    assert made[1].param_groups[-1]["params"][0] is model.a


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_the_masters_do_not_follow_the_model_after_a_step(level: str) -> None:
    model: Any = Dot()
    reference = twin(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.125) for m in (model, reference))
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=64.0)
    for number in range(3):
        if number == 2:
            with torch.no_grad():
                model.a.fill_(8.0)
        optimizer.zero_grad()
        run_backward(model(X), optimizer)
        optimizer.step()
        plain_iterate(reference, plain, X)
    assert_follows(optimizer, reference)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_ctrl_c_in_the_body_drops_what_its_backward_left(level: str) -> None:
    model, optimizer = started(level)
    with pytest.raises(KeyboardInterrupt), xamp.scale_loss(model(X), optimizer) as scaled:  # noqa: PT012
        scaled.backward()
        raise KeyboardInterrupt
    assert gradients(optimizer) == [None, None]
    assert [p.grad for p in model.parameters()] == [None, None]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_is_closed_though_its_object_is_kept(level: str) -> None:
    model, optimizer = started(level)
    block = xamp.scale_loss(model(X), optimizer)
    with block as scaled:
        scaled.backward()
    optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED
    assert block is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_the_backend_refuses_changes_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend may see only now that an optimizer is wrong: a script has changed what it holds."""
    model, optimizer = started(level)
    before = [param.detach().clone() for param in model.parameters()]
    run_backward(model(X), optimizer)
    backend = type(xamp.session(optimizer).engine.backend)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "optimizer_refusal", lambda self, optimizer, casts: "" if casts else "holds copies")
        with pytest.raises(xamp.StateError, match=r"optimizer.step\(\): SGD holds copies"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
