"""Gradients that wait for a step in one pass: who reads, writes or clears them finds what is there without one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import onepass_reference
import pytest
import torch
from injection import Fault, ends_of, in_one_pass
from one_pass_loops import AS_TORCH, IN_ONE_PASS, Loop, assert_alike
from one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.errors import StateError
from xamp.plans.waiting import has_gradient

pytestmark = pytest.mark.usefixtures("reference")

Read = Callable[[Loop, list[Any]], object]


def _by_hook(loop: Loop, found: list[Any]) -> None:
    """A hook that runs in the step itself."""
    handle = loop.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.extend(p.grad.clone() for g in optimizer.param_groups for p in g["params"])
    )
    loop.optimizer.step()
    handle.remove()


def _compiled(loop: Loop, found: list[Any]) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda params: [2 * p.grad for p in params], backend="eager")
    found.extend(each / 2 for each in double(loop.masters))


READS: dict[str, Read] = {
    "a list from before the first step": lambda loop, found: found.extend(p.grad for p in loop.masters),
    "master_params": lambda loop, found: found.extend(p.grad for p in xamp.master_params(loop.optimizer)),
    "param_groups": lambda loop, found: found.extend(p.grad for p in loop.optimizer.param_groups[0]["params"]),
    "a hook of the step": _by_hook,
    "compiled code": _compiled,
    "inference mode": lambda loop, found: torch.inference_mode()(lambda: found.extend(p.grad for p in loop.masters))(),
    "clip_grad_value_": lambda loop, found: xamp.clip_grad_value_(loop.optimizer, 1e-3),
    "torch's clipping": lambda loop, found: torch.nn.utils.clip_grad_norm_(loop.masters, 0.1),
    "a new gradient": lambda loop, found: setattr(loop.masters[0], "grad", torch.ones_like(loop.masters[0])),
    "no gradient": lambda loop, found: setattr(loop.masters[0], "grad", None),
    "del": lambda loop, found: delattr(loop.masters[3], "grad"),
}


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_who_reads_finds_the_gradients_and_the_step_is_torchs(level: str, read: str, clipped: bool) -> None:
    """Bit for bit: from here on it is the ordinary step."""
    loops, found = [Loop(fused, level) for fused in (IN_ONE_PASS, AS_TORCH)], [[], []]  # type: ignore[var-annotated]
    loops[0].run(range(2))
    loops[1].load(loops[0].saved())
    loops[1].made = loops[0].made
    for loop, grads in zip(loops, found, strict=True):
        loop.optimizer.zero_grad()
        loop.backward()
        assert loop.waits() == (loop is loops[0])
        if clipped:
            xamp.clip_grad_norm_(loop.optimizer, 0.1)
        READS[read](loop, grads)
        if read != "a hook of the step":
            loop.optimizer.step()
    assert len(found[0]) == len(found[1])
    if not clipped:  # the factor comes from a norm that was summed in another order
        assert all(map(torch.equal, *found))
    for a, b in zip(loops[0].weights(), loops[1].weights(), strict=True):
        same = torch.allclose(a, b, rtol=1e-5, atol=1e-7) if clipped else torch.equal(a, b)
        assert same or read in ("no gradient", "del")  # the others still wait
    assert_alike(*loops)


def test_no_fp32_gradient_exists_until_somebody_reads_one() -> None:
    loop = Loop(IN_ONE_PASS, norm=False)
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.backward()
        assert not any(map(has_gradient, loop.masters))
        loop.optimizer.step()
        assert not any(map(has_gradient, loop.masters))
    assert all(type(master) is not nn.Parameter for master in loop.masters)
    assert loop.masters[0].grad is not None
    assert all(type(master) is nn.Parameter and has_gradient(master) for master in loop.masters)


def test_copies_and_pickles_are_plain_parameters() -> None:
    loop = Loop(IN_ONE_PASS)
    loop.iterate()
    ways: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(loop.masters[0]),
        lambda: pickle.loads(pickle.dumps(loop.masters[0])),
        lambda: copy.deepcopy(loop.optimizer).param_groups[0]["params"][0],
    ]
    for way in ways:
        assert type(made := way()) is nn.Parameter
        assert torch.equal(made, loop.masters[0])
        assert vars(made) == {}
        loop.iterate()
        assert loop.waits()


def _drop(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        param.grad = None


CLEARS: dict[str, Callable[[Loop], object]] = {
    "optimizer": lambda loop: loop.optimizer.zero_grad(),
    "model": lambda loop: loop.model.zero_grad(),
    "model, to zeros": lambda loop: loop.model.zero_grad(set_to_none=False),
    "parameters": lambda loop: _drop(loop.model.parameters()),
    "masters": lambda loop: _drop(loop.masters),
}


@pytest.mark.parametrize("then", ["step", "backward"])
@pytest.mark.parametrize("clear", CLEARS)
def test_what_is_cleared_is_gone(clear: str, then: str) -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.run(range(2))
        loop.optimizer.zero_grad()
        loop.backward()
        CLEARS[clear](loop)
        if then == "backward":
            loop.backward()
        loop.optimizer.step()
        loop.run(range(2))
    assert loops[0].waits()
    assert_alike(*loops)


def test_a_part_that_is_cleared_is_an_error() -> None:
    loop = Loop(IN_ONE_PASS)
    loop.run(range(2))
    loop.optimizer.zero_grad()
    loop.backward()
    loop.model[3].weight.grad = None
    with pytest.raises(StateError, match="the gradients of a part of the model were cleared"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.iterate()


@pytest.mark.parametrize("write", ["clip", "backward", "new"])
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "read", "scale_loss"])
def test_a_write_into_the_models_gradients_is_an_error(call: str, write: str) -> None:
    loop = Loop(IN_ONE_PASS, norm=False)
    loop.run(range(2))
    loop.optimizer.zero_grad()
    loop.backward()
    before = loop.weights()
    if write == "clip":
        torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    elif write == "backward":
        loop.loss().backward()
    else:
        loop.model[2].bias.grad = torch.ones_like(loop.model[2].bias)
    calls: dict[str, Callable[[], object]] = {
        "step": loop.optimizer.step,
        "clip_grad_norm_": lambda: xamp.clip_grad_norm_(loop.optimizer, 1.0),
        "read": lambda: loop.masters[0].grad,
        "scale_loss": loop.backward,
    }
    with pytest.raises(StateError, match="gradients of the model's own parameters were written to"):
        calls[call]()
    assert all(map(torch.equal, loop.weights(), before))
    loop.optimizer.zero_grad()
    loop.iterate()
    assert loop.waits()


def test_autograd_sees_that_a_step_has_written_the_weights() -> None:
    loop = Loop(IN_ONE_PASS, norm=False)
    loop.run(range(2))
    late = loop.loss()
    loop.iterate()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_a_step_is_no_lost_write(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(IN_ONE_PASS)
    loop.run(range(20), overflows=[7])
    assert not caplog.records
    with torch.no_grad():
        loop.model[3].bias.add_(1.0)
    loop.run(range(2))
    assert [record for record in caplog.records if "differs from its fp32 master" in record.getMessage()]


@pytest.mark.parametrize("moves", ["weight", "state"])
def test_the_parameters_of_a_step_may_move(moves: str) -> None:
    """Their storage, or the tensors of the state: the plan is made again."""
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.run(range(2))
        if moves == "weight":
            loop.model[0].weight.data = loop.model[0].weight.data.clone()
        else:
            state = loop.optimizer.state[loop.masters[0]]
            state["exp_avg"] = state["exp_avg"].clone()
        loop.run(range(3))
    assert_alike(*loops)


@pytest.mark.parametrize("view", [False, True])
def test_under_ddp(view: bool) -> None:
    """With gradients in buckets, which the next forward writes anew, they do not wait."""
    with one_rank():
        loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
        for loop in loops:
            inner = loop.model
            loop.model = DistributedDataParallel(inner, gradient_as_bucket_view=view)
            for number in range(5):
                loop.optimizer.zero_grad()
                loop.backward(number == 2)
                if number == 3:
                    loop.backward()
                assert loop.waits() == (loop is loops[0] and not view and number != 3)
                loop.optimizer.step()
            loop.model = inner
        assert_alike(*loops)


def interrupted(steps: int, form: str, overflow: bool, chosen: Callable[[list[str]], Iterable[int]]) -> None:
    """Interrupt a step at the chosen points: it is done, or it is not and can be taken again; never twice."""

    def begun() -> Loop:
        loop = Loop(IN_ONE_PASS, form=form)
        loop.run(range(steps))
        loop.optimizer.zero_grad()
        loop.backward(overflow)
        return loop

    wanted = begun()
    with Fault("line") as points:
        wanted.optimizer.step()
    wanted.run(range(2))
    for n in chosen(points.seen):
        loop = begun()
        with Fault("line", n):
            loop.optimizer.step()
        stats = xamp.session(loop.optimizer).stats
        if stats.applied + stats.skipped == steps:
            loop.optimizer.step()
        loop.run(range(2))
        assert loop.counted() == wanted.counted(), points.seen[n]
        assert all(map(torch.equal, loop.weights(), wanted.weights())), points.seen[n]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("steps", "form", "overflow"),
    [(0, "AdamW", False), (0, "momentum", True), (2, "AdamW", True), (2, "momentum", False)],
)
def test_an_interrupt_at_some_lines_of_a_step(steps: int, form: str, overflow: bool) -> None:
    """At all lines of one pass, and a third of the others, another in each case, when first and when last reached."""
    third = (steps + overflow) % 3
    interrupted(steps, form, overflow, lambda seen: sorted({*in_one_pass(seen), *ends_of(seen)[third::3]}))


@pytest.mark.thorough
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("form", ["AdamW", "momentum"])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_interrupt_at_any_line_of_a_step(steps: int, form: str, overflow: bool) -> None:
    interrupted(steps, form, overflow, lambda seen: range(len(seen)))


@pytest.mark.parametrize("n", range(40))
def test_an_interrupt_while_gradients_move_into_the_masters(n: int) -> None:
    loop, twin = (Loop(IN_ONE_PASS, norm=False) for _ in range(2))
    for each in (loop, twin):
        each.run(range(2))
        each.optimizer.zero_grad()
        each.backward()
    wanted: list[Any] = [master.grad for master in twin.masters]
    with Fault("line", n):
        assert loop.masters[0].grad is not None
    found: list[Any] = [master.grad for master in loop.masters]
    assert all(map(torch.equal, found, wanted))
    loop.optimizer.step()
    twin.optimizer.step()
    assert_alike(loop, twin)


def test_closing_gives_the_gradients_back(reference: type[onepass_reference.Plan]) -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.optimizer.zero_grad()
        loop.backward()
        xamp.session(loop.optimizer).close()
    ours, theirs = ([p.grad.clone() for p in loop.model.parameters()] for loop in loops)
    assert all(map(torch.equal, ours, theirs))
    assert all(type(p) is nn.Parameter for p in loops[0].masters)
    assert reference.calls == ["check"]
