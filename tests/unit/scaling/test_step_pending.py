"""Gradients that wait: under a scale that moves meanwhile, under scales that are no powers of two, through errors.

The gradient of ``Dot`` is its input, so every sum is known to the bit.

Covers: xamp.scaling.gradients, xamp.scaling.unscale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import Dot, at
from torch import nn
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.errors import StateError

INEXACT: dict[str, dict[str, Any]] = {
    "static": {"loss_scale": 1000.0},
    "start": {"init_scale": 1000.0},
    "growth": {"init_scale": 64.0, "growth_factor": 3.0, "growth_interval": 1},
    "loaded": {"init_scale": 64.0},
}
"""Ways to come to a scale that is no power of two."""

ONES = torch.ones(7)
FINE = torch.linspace(0.1, 0.7, 7)
"""Numbers with all their digits in use: multiplied by 1000 and divided again, some come out otherwise."""


def start(level: str, model: Any = None, make: Any = SGD, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Dot() if model is None else model
    optimizer = make(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})
    return model, optimizer


def backward(model: Any, optimizer: Any, x: torch.Tensor = ONES, *, overflow: bool = False, **options: Any) -> None:
    with xamp.scale_loss(model(x), optimizer, **options) as scaled:
        scaled.backward()
        if overflow:
            model.a.grad[0] = torch.inf


def gradients(optimizer: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in xamp.master_params(optimizer) if p.grad is not None])


def gradients_now(model: Any) -> torch.Tensor | None:
    """What the parameters have, scaled or not."""
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found) if found else None


def skipped(optimizer: Any) -> int:
    return int(xamp.session(optimizer).stats.skipped)


CHECK = "_amp_foreach_non_finite_check_and_unscale_"


class Once(TorchDispatchMode):
    """Raises KeyboardInterrupt at the first call of one aten operator, after it or ``before`` it."""

    def __init__(self, operator: str, *, before: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._before = operator, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        met = str(func).startswith(f"aten.{self._operator}.")
        if met and self._before:
            raise KeyboardInterrupt
        result = func(*args, **(kwargs or {}))
        if met:
            raise KeyboardInterrupt
        return result


# ---------------------------------------------------------------- the scale moves while gradients are pending


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pending_gradients_keep_the_scale_that_they_have(level: str) -> None:
    """Another optimizer backs the scale off, twice, and uses the new one, while gradients wait."""
    model, optimizer = start(level)
    xamp.session(model).close()
    other = Dot()
    second = SGD(other.parameters(), lr=0.125)
    xamp.initialize([model, other], [optimizer, second], init_scale=64.0, **at(level))
    backward(model, optimizer, ONES, delay_unscale=True)
    for count in range(2):
        for overflow in (True, False):
            second.zero_grad()
            backward(other, second, overflow=overflow)
            second.step()
        if count == 0:
            backward(model, optimizer, 2 * ONES, delay_unscale=True)
    assert xamp.loss_scale(optimizer) == 16.0
    backward(model, optimizer, 4 * ONES)
    assert torch.equal(gradients(optimizer), 7 * ONES)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pending_gradients_survive_a_scale_that_is_loaded(level: str) -> None:
    model, optimizer = start(level)
    state = xamp.state_dict(optimizer)
    state["scalers"][0]["scale"] = 512.0
    backward(model, optimizer, ONES, delay_unscale=True)
    xamp.load_state_dict(state, optimizer)
    assert xamp.loss_scale(optimizer) == 512.0
    backward(model, optimizer, 2 * ONES)
    assert torch.equal(gradients(optimizer), 3 * ONES)


def test_an_update_after_a_load_stays_within_the_bounds() -> None:
    """What the host knew of the old scale, far from its bounds, says nothing of the new one."""
    model, optimizer = start("O1", growth_interval=1, max_loss_scale=2.0**20, fused=False)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    state = xamp.state_dict(optimizer)
    state["scalers"][0]["scale"] = 2.0**20
    xamp.load_state_dict(state, optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 2.0**20


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_comes_to_the_number_of_another_has_an_inverse_of_its_own(level: str) -> None:
    model, optimizer = start(level, num_losses=2, growth_interval=2)
    for _ in range(2):
        backward(model, optimizer, loss_id=1)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, optimizer, overflow=True, loss_id=1)  # now both are 64, and only one inverse is up to date
    optimizer.step()
    optimizer.zero_grad()
    assert [xamp.loss_scale(optimizer, i) for i in range(2)] == [64.0, 64.0]
    for loss_id in (1, 0):
        backward(model, optimizer, loss_id=loss_id)
        assert torch.equal(gradients(optimizer), ONES)
        optimizer.zero_grad()


# ---------------------------------------------------------------- scales that are no powers of two, other dtypes


@pytest.mark.parametrize("way", INEXACT)
def test_what_was_accumulated_keeps_every_digit(way: str) -> None:
    """The second backward adds zeros; under any scale the sum is the first gradient, bit for bit."""
    model, optimizer = start("O1", **INEXACT[way])
    if way == "loaded":
        state = xamp.state_dict(optimizer)
        state["scalers"][0]["scale"] = 1000.0
        xamp.load_state_dict(state, optimizer)
    if way == "growth":
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert xamp.loss_scale(optimizer) == 192.0
    backward(model, optimizer, FINE)
    before = gradients(optimizer).clone()
    for _ in range(4):
        backward(model, optimizer, 0 * ONES)
    assert torch.equal(gradients(optimizer), before)


def test_gradients_in_fp16_are_not_multiplied_by_the_scale() -> None:
    """30 * 4096 is no fp16 number."""
    model, optimizer = start("O3", loss_scale=4096.0)
    for _ in range(30):
        backward(model, optimizer)
    assert torch.equal(gradients(optimizer).float(), 30 * ONES)
    optimizer.step()
    assert skipped(optimizer) == 0


def test_an_inf_that_was_put_aside_is_found_once() -> None:
    model, optimizer = start("O1", init_scale=1000.0)
    backward(model, optimizer, overflow=True)
    backward(model, optimizer)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 500.0
    assert skipped(optimizer) == 1


def test_an_inf_that_was_put_aside_and_postponed_is_found_once() -> None:
    model, optimizer = start("O1", init_scale=1000.0)
    backward(model, optimizer, overflow=True)
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 500.0


def test_an_inf_put_aside_from_a_skipped_step_cannot_reach_the_weights() -> None:
    """As in a script that forgets ``zero_grad``."""
    model, optimizer = start("O1", init_scale=1000.0, fused=False)
    backward(model, optimizer, overflow=True)
    optimizer.step()
    backward(model, optimizer)
    optimizer.step()
    assert skipped(optimizer) == 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_gradients_that_were_cleared_are_not_taken_for_mixed() -> None:
    """The second overflow is a new one, though the first one's flag is still up."""
    model, optimizer = start("O1")
    backward(model, optimizer)
    backward(model, optimizer)  # mixed with the first
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, overflow=True)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 16.0


def test_pending_gradients_that_were_cleared_are_not_taken_for_mixed() -> None:
    model, optimizer = start("O1")
    backward(model, optimizer, overflow=True)
    backward(model, optimizer, delay_unscale=True)  # mixed with the first
    for param in model.parameters():
        param.grad = None
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 16.0


def test_half_sparse_gradients_are_summed_before_they_are_checked() -> None:
    """Each of the repeated rows is finite, and their sum, which the optimizer steps, is not."""
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O3", loss_scale=2.0, on_static_overflow="skip", verbosity=0)
    before = model.weight.detach().clone()
    with xamp.scale_loss((model(torch.tensor([1, 1, 1, 1])).float() * 15000.0).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), before)
    assert skipped(optimizer) == 1


# ---------------------------------------------------------------- what counts as gradients


def test_a_loss_that_reaches_nothing_leaves_the_gradients_of_the_one_before() -> None:
    model, optimizer = start("O2")
    backward(model, optimizer)
    elsewhere = torch.ones((), requires_grad=True)
    with xamp.scale_loss(elsewhere * 1.0, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == (1, 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_gradients_of_zeros_makes_the_state_of_a_new_optimizer(level: str) -> None:
    """As ``torch.distributed.checkpoint`` does before it loads; later such a step is refused."""
    model, optimizer = start(level, make=Adam)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        for param in xamp.master_params(optimizer):
            param.grad = torch.zeros_like(param)
        if optimizer.state:
            with pytest.raises(StateError, match="did not come through scale_loss"):
                optimizer.step()
        else:
            optimizer.step()
        assert len(optimizer.state) == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_first_step_with_gradients_of_lowered_parameters_only_is_refused() -> None:
    model, optimizer = start("O2")
    model(ONES).backward()
    with pytest.raises(StateError, match="did not come through scale_loss"):
        optimizer.step()


def test_gradients_of_before_a_load_are_not_stepped() -> None:
    model, optimizer = start("O1")
    state = xamp.state_dict(optimizer)
    backward(model, optimizer)
    xamp.load_state_dict(state, optimizer)
    with pytest.raises(StateError, match="did not come through scale_loss"):
        optimizer.step()


def test_an_overflow_of_before_a_load_skips_nothing() -> None:
    model, optimizer = start("O1")
    state = xamp.state_dict(optimizer)
    backward(model, optimizer, overflow=True)
    xamp.load_state_dict(state, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert skipped(optimizer) == 0


# ---------------------------------------------------------------- the sentinel


def test_gradients_outlive_a_new_group_and_are_cleared_one_by_one() -> None:
    model, optimizer = start("O2")
    backward(model, optimizer)
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    for param in model.parameters():
        param.grad = None
    backward(model, optimizer, 2 * ONES)
    assert torch.equal(gradients(optimizer), 2 * ONES)


def test_a_new_group_leaves_no_gradient_where_there_was_none() -> None:
    model, optimizer = start("O2")
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert all(p.grad is None for p in model.parameters())


def test_gradients_can_be_cleared_one_by_one_after_an_error() -> None:
    model, optimizer = start("O2")
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError), xamp.scale_loss(model(ONES), optimizer):
        raise ZeroDivisionError
    for param in model.parameters():
        param.grad = None
    backward(model, optimizer, 2 * ONES)
    assert torch.equal(gradients(optimizer), 2 * ONES)


# ---------------------------------------------------------------- errors and interrupts


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("clears", [False, True])
def test_a_half_backward_on_pending_gradients_drops_them(level: str, clears: bool) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, delay_unscale=True)
    with pytest.raises(ZeroDivisionError), xamp.scale_loss(model(ONES), optimizer) as scaled:  # noqa: PT012
        if clears:
            for param in model.parameters():
                param.grad = None
        scaled.backward()
        raise ZeroDivisionError
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    applied = xamp.session(optimizer).stats.applied
    optimizer.step()
    assert xamp.session(optimizer).stats.applied == applied, "a step without gradients was counted"
    backward(model, optimizer, 2 * ONES)
    assert torch.equal(gradients(optimizer), 2 * ONES)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pending_gradients_that_were_brought_to_another_scale_keep_it(level: str) -> None:
    """The body raises before it has touched them, after the entry has multiplied them."""
    model, optimizer = start(level, num_losses=2)
    backward(model, optimizer, overflow=True, loss_id=1)  # its scale is 32 now
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, delay_unscale=True)
    with pytest.raises(ZeroDivisionError), xamp.scale_loss(model(ONES), optimizer, loss_id=1):
        raise ZeroDivisionError
    backward(model, optimizer, 2 * ONES)
    assert torch.equal(gradients(optimizer), 3 * ONES)


def test_dropped_gradients_do_not_count_as_gradients() -> None:
    model, optimizer = start("O1")
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError), xamp.scale_loss(model(ONES), optimizer) as scaled:  # noqa: PT012
        scaled.backward()
        raise ZeroDivisionError
    optimizer.step()
    assert xamp.session(optimizer).stats.applied == 0


@pytest.mark.parametrize("overflow", [False, True])
def test_a_check_that_is_interrupted_is_forgotten(overflow: bool) -> None:
    """With its backward and the overflow that it found; somebody still holds the block."""
    model, optimizer = start("O1")
    block = xamp.scale_loss(model(ONES), optimizer)
    with pytest.raises(KeyboardInterrupt), block as scaled:  # noqa: PT012
        scaled.backward()
        if overflow:
            model.a.grad[0] = torch.inf
        interrupt: Any = Once(CHECK)
        interrupt.__enter__()
    interrupt.__exit__(None, None, None)
    assert xamp.loss_scale(optimizer) == 64.0
    assert all(p.grad is None for p in model.parameters())
    backward(model, optimizer)
    optimizer.step()
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == (1, 0)
    assert block is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_whose_move_is_interrupted_stays_within_its_bounds_and_grows_on(level: str) -> None:
    """Ctrl-C comes behind torch's kernel, before the scale is brought back and the clean update is taken back."""
    model, optimizer = start(level, growth_interval=2, max_loss_scale=64.0)
    for _ in range(2):  # one clean update, and a window that the next scale_loss ends without a step
        optimizer.zero_grad()
        backward(model, optimizer)
        if not xamp.session(optimizer).stats.applied:
            optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(KeyboardInterrupt), Once("_amp_update_scale_"):
        backward(model, optimizer)
    assert xamp.state_dict(optimizer)["scalers"][0] == {"dynamic": True, "scale": 64.0, "growth_tracker": 1}
    backward(model, optimizer)
    with pytest.raises(KeyboardInterrupt), Once("clamp_", before=True):
        optimizer.step()
    assert xamp.loss_scale(optimizer) == 64.0


# ---------------------------------------------------------------- closures, refusals and words before a step


def test_no_hook_of_a_closure_stays_on_a_parameter() -> None:
    model, optimizer = start("O2")
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step(lambda: 0.0)
        optimizer.zero_grad()
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)


def test_a_closure_runs_with_gradients_on() -> None:
    model, optimizer = start("O1")
    backward(model, optimizer)
    found: list[bool] = []
    with torch.no_grad():
        optimizer.step(lambda: found.append(torch.is_grad_enabled()))
    assert found == [True]


def test_a_step_is_refused_after_ranks_have_parted() -> None:
    model, optimizer = start("O1")
    backward(model, optimizer)
    xamp.session(optimizer).engine.fellows.refusal = "the ranks have parted"
    with pytest.raises(StateError, match=r"optimizer\.step\(\): the ranks have parted"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, "auto"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_step_that_found_no_gradient_has_no_outcome(level: str, fused: Any) -> None:
    model, optimizer = start(level, fused=fused)
    for overflow in (False, level in ("O1", "O2")):
        backward(model, optimizer, overflow=overflow)
        optimizer.step()
        known = "SKIPPED" if overflow else "APPLIED"
        stats = repr(xamp.session(optimizer).stats)
        assert xamp.session(optimizer).last_step.name == known  # type: ignore[union-attr]
        optimizer.zero_grad()
        optimizer.step()
        assert xamp.session(optimizer).last_step is None
        assert repr(xamp.session(optimizer).stats) == stats
        assert xamp.session(model).metrics()["last_step_skipped"] == 0


def test_a_step_without_any_gradient_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = start("O1")
    for _ in range(3):
        optimizer.step()
    assert [r.getMessage()[:32] for r in caplog.records] == ["SGD.step() finds no gradient on "]
