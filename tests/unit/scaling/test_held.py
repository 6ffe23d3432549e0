"""Gradients that are held for a step in one pass: where they are, who gets them, and what is seen of the model's.

Covers: xamp.scaling.held, xamp.scaling.gradients.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import onepass_reference
import pytest
import torch
from one_pass_loops import AS_TORCH, IN_ONE_PASS, Loop, assert_alike
from one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import xamp
from xamp.errors import LossScaleCollapsed, StateError
from xamp.scaling.counts import COLLAPSE_RUN

SCALE = 2.0**10


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> type[onepass_reference.Plan]:
    """The reference is in the place of the kernels."""
    return onepass_reference.use(monkeypatch)


def pair(level: str = "O2", **options: Any) -> list[Loop]:
    """Two loops with the same weights, states and data, after two steps; the second steps as torch does."""
    loops = [Loop(fused, level, **options) for fused in (IN_ONE_PASS, AS_TORCH)]
    loops[0].run(range(2))
    loops[1].load(loops[0].saved())
    loops[1].made = loops[0].made
    for loop in loops:
        loop.optimizer.zero_grad()
    return loops


def held_by(loop: Loop) -> Loop:
    """Run a backward of which the gradients are held."""
    loop.optimizer.zero_grad()
    loop.backward()
    assert loop.holds()
    return loop


def low_precision(loop: Loop) -> list[nn.Parameter]:
    return [p for p in loop.model.parameters() if p.dtype != torch.float32]


def grads_of(loop: Loop) -> list[Any]:
    """The gradients of what the optimizer steps, read where torch's own code does."""
    return [p.grad for group in loop.optimizer.param_groups for p in group["params"]]


def unscaled(loop: Loop) -> list[torch.Tensor]:
    """What the gradients of the last backward are in fp32."""
    return [grad.float() for grad in loop.grads[-1] if grad is not None]


def equal(found: Iterable[Any], wanted: Iterable[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- where they are


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_storages_of_the_backward_are_held_as_they_are(level: str) -> None:
    loop = Loop(IN_ONE_PASS, level).run(range(2))
    loop.optimizer.zero_grad()
    with xamp.scale_loss(loop.loss(), loop.optimizer) as scaled:
        scaled.backward()
        grads: list[Any] = [p.grad for p in loop.model.parameters()]
        places, values = [grad.data_ptr() for grad in grads], [grad.clone() for grad in grads]
    scale = xamp.loss_scale(loop.optimizer)
    held = loop.state.gradients.held
    own = [number for number, p in enumerate(loop.model.parameters()) if p.dtype != torch.float32]
    assert [grad.data_ptr() for grad in held.grads] == [places[number] for number in own]
    assert equal(held.grads, [values[number] for number in own])
    assert float(held.inverse) == 1.0 / scale if level == "O2" else held.inverse is None
    direct: Any = loop.model[1]
    assert equal([direct.weight.grad, direct.bias.grad], [values[number] / scale for number in (2, 3)])


def test_nobody_sees_a_gradient_but_on_two_parameters() -> None:
    loop = Loop(IN_ONE_PASS, norm=False)
    for _ in range(3):
        held_by(loop)
        assert grads_of(loop) == [None] * 4
        left: list[Any] = [p.grad for p in loop.model.parameters()]
        assert [place for place, grad in enumerate(left) if grad is not None] == [1, 3]
        grads: Any = loop.grads[-1]
        assert equal([left[place] * 1.0 for place in (1, 3)], [grads[place].float() for place in (1, 3)])
        loop.optimizer.step()
        assert grads_of(loop) == [None] * 4
    assert all(type(master) is nn.Parameter for master in loop.masters)


def test_what_was_stepped_stays_until_it_is_cleared(reference: type[onepass_reference.Plan]) -> None:
    loop = held_by(Loop(IN_ONE_PASS, norm=False).run(range(2)))
    reference.calls = []
    loop.optimizer.step()
    assert reference.calls == ["step"]
    gradients, stepped = loop.state.gradients, loop.weights()
    assert gradients.state.name == "SPENT"
    assert equal([g.float() * gradients.held.inverse for g in gradients.held.grads], unscaled(loop))
    with pytest.raises(StateError, match="did not come through scale_loss since the last step"):
        loop.optimizer.step()
    assert equal(loop.weights(), stepped)
    loop.optimizer.zero_grad()
    assert gradients.state.name == "CLEAR"
    assert gradients.held is None


# ---------------------------------------------------------------- what may not be held


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch says so once in a process
def test_gradients_with_a_graph_go_to_the_masters() -> None:
    loop = Loop(IN_ONE_PASS, norm=False).run(range(2))
    loop.optimizer.zero_grad()
    with xamp.scale_loss(loop.loss(), loop.optimizer) as scaled:
        scaled.backward(create_graph=True)
        wanted: list[Any] = [p.grad.detach().float() / SCALE for p in loop.model.parameters()]
    assert not loop.holds()
    assert equal(grads_of(loop), wanted)


def test_a_master_that_has_a_gradient_gets_the_next_one() -> None:
    loop = Loop(IN_ONE_PASS, norm=False).run(range(2))
    loop.optimizer.zero_grad()
    loop.masters[0].grad = torch.ones_like(loop.masters[0])
    loop.backward()
    assert not loop.holds()
    first, *others = unscaled(loop)
    assert equal(grads_of(loop), [first + 1.0, *others])


@pytest.mark.parametrize("view", [False, True])
def test_under_ddp(view: bool) -> None:
    """Gradients in buckets, which the next forward writes anew, go to the masters."""
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
                is_held = loop is loops[0] and not view and number != 3
                assert loop.holds() == is_held
                assert all((m.grad is None) == is_held for _, m in loop.state.gradients.params.pairs)
                loop.optimizer.step()
            loop.model = inner
        assert_alike(*loops)


# ---------------------------------------------------------------- who gets them


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_master_params_unscales_them_into_the_masters_at_the_call(level: str, clipped: bool) -> None:
    """Bit for bit, and the step that follows is torch's."""
    loops = pair(level)
    for loop in loops:
        loop.backward()
        if clipped:
            loop.state.gradients.held.clip_by(torch.tensor(0.5)) if loop.holds() else [
                master.grad.mul_(0.5) for master in loop.masters if master.grad is not None
            ]
    ours = xamp.master_params(loops[0].optimizer)
    assert not loops[0].holds()  # though nobody has taken one
    factor = 0.5 if clipped else 1.0
    own = [n for n, p in enumerate(loops[0].model.parameters()) if p.dtype != torch.float32]
    wanted = unscaled(loops[0])
    found = [master.grad for master in ours]
    assert equal([found[n] for n in own], [wanted[n] * factor for n in own])
    assert all(grad is master.grad for grad, master in zip(found, loops[0].masters, strict=True))
    if not clipped:
        for loop in loops:
            loop.optimizer.step()
        assert equal(loops[0].weights(), loops[1].weights())
        assert_alike(*loops)


Change = Callable[[Loop], object]


def _by_hand(loop: Loop) -> None:
    new = nn.Parameter(torch.ones(3, dtype=torch.float16))
    loop.optimizer.param_groups[0]["params"].append(new)
    xamp.clip_grad_norm_(loop.optimizer, 1e9)


def _hooked(loop: Loop, add: Callable[[Any], Any]) -> None:
    seen: list[Any] = []
    handle = add(lambda *_: seen.extend(grad.clone() for grad in grads_of(loop)))
    loop.optimizer.step()
    handle.remove()
    assert equal(seen, unscaled(loop))


INTO_THE_MASTERS: dict[str, Change] = {
    "clip_grad_value_": lambda loop: xamp.clip_grad_value_(loop.optimizer, 1e9),
    "a group": lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "a group by hand": _by_hand,
    "a load": lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
    "a hook before the step": lambda loop: _hooked(loop, loop.optimizer.register_step_pre_hook),
    "a hook of all optimizers": lambda loop: _hooked(loop, register_optimizer_step_pre_hook),
}


@pytest.mark.parametrize("change", INTO_THE_MASTERS)
def test_what_ends_the_holding_gets_them_into_the_masters_first(change: str) -> None:
    loop = held_by(Loop(IN_ONE_PASS, norm=False).run(range(2)))
    INTO_THE_MASTERS[change](loop)
    assert not loop.holds()
    assert equal([master.grad for master in loop.masters], unscaled(loop))


def test_closing_gives_the_gradients_back(reference: type[onepass_reference.Plan]) -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.optimizer.zero_grad()
        loop.backward()
        xamp.session(loop.optimizer).close()
    ours, theirs = ([p.grad.clone() for p in loop.model.parameters()] for loop in loops)
    assert equal(ours, theirs)
    assert reference.calls == ["check"]


def test_the_next_backward_finds_them_in_the_masters() -> None:
    """With the scale and the factor of their own, and before it may overwrite their storage."""
    loop = held_by(Loop(IN_ONE_PASS, norm=False, growth_interval=1).run(range(2)))
    gradients = loop.state.gradients
    held, scale = gradients.held.grads[:], xamp.loss_scale(loop.optimizer)
    wanted = unscaled(loop)
    gradients.held.clip_by(torch.tensor(0.25))
    loop.optimizer.step()
    assert xamp.loss_scale(loop.optimizer) == 2 * scale
    with xamp.scale_loss(loop.loss(), loop.optimizer) as scaled:
        assert gradients.held is None
        assert equal(grads_of(loop), [grad * 0.25 for grad in wanted])
        for grad in held:
            grad.fill_(torch.nan)
        scaled.backward()
        second: list[Any] = [p.grad.float() / (2 * scale) for p in loop.model.parameters()]
    assert equal(grads_of(loop), [a * 0.25 + b for a, b in zip(wanted, second, strict=True)])
    assert not loop.holds()


def test_a_body_that_raises_leaves_what_was_held() -> None:
    loop = held_by(Loop(IN_ONE_PASS, norm=False).run(range(2)))
    with contextlib.suppress(ZeroDivisionError), xamp.scale_loss(loop.loss(), loop.optimizer) as scaled:
        scaled.backward()
        raise ZeroDivisionError
    assert equal(grads_of(loop), unscaled(loop))


def test_inference_mode_around_a_call_makes_no_difference() -> None:
    loops = pair(norm=False)
    for loop in loops:
        for call in (
            lambda: xamp.clip_grad_norm_(loop.optimizer, 1e-3),  # noqa: B023
            lambda: list(xamp.master_params(loop.optimizer)),  # noqa: B023
        ):
            loop.optimizer.zero_grad()
            loop.backward()
            with torch.inference_mode():
                call()
            loop.backward()  # autograd may not write into what inference has made
            assert not any(grad.is_inference() for grad in grads_of(loop))
            loop.optimizer.step()
    assert_alike(*loops)


# ---------------------------------------------------------------- norms


def test_norms_are_taken_of_what_is_held(reference: type[onepass_reference.Plan]) -> None:
    loop = held_by(Loop(IN_ONE_PASS).run(range(2)))
    reference.calls = []
    wanted = float(torch.cat([grad.double().flatten() for grad in unscaled(loop)]).norm())
    assert xamp.session(loop.optimizer).metrics()["grad_norm"] == pytest.approx(wanted, rel=1e-6)
    assert float(xamp.clip_grad_norm_(loop.optimizer, wanted / 2)) == pytest.approx(wanted, rel=1e-6)
    assert float(xamp.clip_grad_norm_(loop.optimizer, 1e9)) == pytest.approx(wanted / 2, rel=1e-5)
    assert reference.calls == ["checked_norm", "checked_norm", "norm"]
    assert loop.holds()
    assert all(master.grad is None for _, master in loop.state.gradients.params.pairs)


def _two(one_pass: Iterable[bool]) -> tuple[Any, list[Any]]:
    """A model and the optimizers of its two layers, of which some hold their gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    xamp.initialize(model, optimizers, "O2", fused=IN_ONE_PASS, init_scale=SCALE, verbosity=0)
    with xamp.scale_loss(model(torch.ones(2, 6)).square().sum(), optimizers) as scaled:
        scaled.backward()
    for optimizer, holds in zip(optimizers, one_pass, strict=True):
        state: Any = optimizer._xamp.state  # type: ignore[attr-defined]
        assert state.gradients.held is not None
        if not holds:
            list(xamp.master_params(optimizer))
    return model, optimizers


@pytest.mark.parametrize("call", ["metrics", "clip_grad_norm_"])
def test_the_norm_over_several_optimizers_is_the_kernels_where_all_hold(call: str) -> None:
    model, optimizers = _two([True, True])
    found = xamp.session(model).metrics()["grad_norm"]
    held = [one._xamp.state.gradients for one in optimizers]
    flat = [grad.double().flatten() / SCALE for each in held for grad in each.held.grads]
    wanted = float(torch.cat(flat).norm())
    if call == "clip_grad_norm_":
        found = float(xamp.clip_grad_norm_(optimizers, wanted / 4))
        assert [float(each.held.clip) for each in held] == pytest.approx([0.25, 0.25], rel=1e-5)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert all(each.held is not None for each in held)


def test_the_norm_over_several_is_torchs_where_one_holds_none() -> None:
    _, optimizers = _two([False, True])
    wanted = float(xamp.clip_grad_norm_(optimizers, 1e9))
    masters = [master for one in optimizers for master in xamp.master_params(one)]
    assert all(one._xamp.state.gradients.held is None for one in optimizers)
    grads: list[Any] = [master.grad for master in masters]
    assert wanted == pytest.approx(float(torch.cat([grad.double().flatten() for grad in grads]).norm()), rel=1e-6)


# ---------------------------------------------------------------- who asks the owner


def test_a_collapse_names_the_parameters_whose_held_gradient_is_not_finite() -> None:
    loop = Loop(IN_ONE_PASS, norm=False, init_scale=1.0, min_loss_scale=1.0)
    loop.run(range(2))

    def overflow() -> None:
        loop.optimizer.zero_grad()
        with xamp.scale_loss(loop.loss(), loop.optimizer) as scaled:
            scaled.backward()
            loop.model[2].weight.grad.fill_(torch.inf)
        assert loop.state.gradients.not_finite() == [loop.masters[2]]
        loop.optimizer.step()

    for _ in range(COLLAPSE_RUN - 1):
        overflow()
    with pytest.raises(LossScaleCollapsed, match=r"2\.weight") as raised:
        overflow()
    assert "0.weight" not in str(raised.value)


def test_missing_and_zero_gradients_are_counted_where_they_are() -> None:
    loop = Loop(IN_ONE_PASS, norm=False).run(range(2))
    loop.model[0].bias.requires_grad_(False)
    held_by(loop)
    gradients = loop.state.gradients
    assert gradients.count_missing() == 1
    assert not gradients.all_zero()
    loop.optimizer.zero_grad()
    with xamp.scale_loss(loop.loss() * 0.0, loop.optimizer) as scaled:
        scaled.backward()
    assert loop.holds()
    assert gradients.all_zero()
    assert not gradients.has_stray()
    loop.optimizer.step()
    assert gradients.has_stray()  # a step has seen them


# ---------------------------------------------------------------- cleared and written


def _drop(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        param.grad = None


CLEARS: dict[str, Change] = {
    "optimizer": lambda loop: loop.optimizer.zero_grad(),
    "model": lambda loop: loop.model.zero_grad(),
    "model, to zeros": lambda loop: loop.model.zero_grad(set_to_none=False),
    "parameters": lambda loop: _drop(loop.model.parameters()),
}


@pytest.mark.parametrize(
    ("clear", "then"),
    [*itertools.product(CLEARS, ["step", "backward", "clip"]), ("optimizer, to zeros", "backward")],
)
@pytest.mark.filterwarnings("ignore:.*finds no gradient:UserWarning")
def test_what_is_cleared_is_gone(clear: str, then: str) -> None:
    loops = [Loop(fused, form="momentum") for fused in (IN_ONE_PASS, AS_TORCH)]
    norms = []
    for loop in loops:
        loop.run(range(2))
        loop.optimizer.zero_grad()
        loop.backward()
        CLEARS[clear](loop) if clear in CLEARS else loop.optimizer.zero_grad(set_to_none=False)
        if then == "backward":
            loop.backward()
        if then == "clip":
            norms.append(float(xamp.clip_grad_norm_(loop.optimizer, 1.0)))
        loop.optimizer.step()
        loop.run(range(2))
    assert loops[0].holds()
    assert norms in ([], [0.0, 0.0])
    assert_alike(*loops)


def test_zeros_stay_where_they_are_asked_for() -> None:
    loop = held_by(Loop(IN_ONE_PASS, norm=False).run(range(2)))
    loop.optimizer.zero_grad(set_to_none=False)
    assert not loop.holds()
    assert all(grad is not None and not grad.any() for grad in grads_of(loop))


@pytest.mark.parametrize("cleared", [0, 1])
def test_one_of_two_models_may_be_cleared(cleared: int) -> None:
    made = []
    for fused in (IN_ONE_PASS, AS_TORCH):
        torch.manual_seed(0)
        models: Any = [nn.Linear(6, 5), nn.Linear(5, 3)]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
        xamp.initialize(models, optimizer, "O2", fused=fused, init_scale=SCALE, verbosity=0)
        norms = []
        for number in range(3):
            optimizer.zero_grad()
            with xamp.scale_loss(models[1](models[0](torch.ones(2, 6))).square().sum(), optimizer) as scaled:
                scaled.backward()
            if number:
                models[cleared].zero_grad()
            norms.append(float(xamp.clip_grad_norm_(optimizer, 0.1)))
            optimizer.step()
        made.append((norms, [p.detach().float() for model in models for p in model.parameters()]))
    assert made[0][0] == pytest.approx(made[1][0], rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(made[0][1], made[1][1], strict=True))


def test_a_part_that_is_cleared_is_an_error() -> None:
    loop = held_by(Loop(IN_ONE_PASS).run(range(2)))
    loop.model[3].weight.grad = loop.model[3].bias.grad = None
    with pytest.raises(StateError, match="the gradients of a part of the model were cleared"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.iterate()


WRITES: dict[str, Change] = {
    "torch's clipping": lambda loop: torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.01),
    "a backward": lambda loop: loop.loss().backward(),
    "a new gradient": lambda loop: setattr(loop.model[0].weight, "grad", torch.ones_like(loop.model[0].weight)),
    "a new gradient for the zeros": lambda loop: setattr(loop.model[2].bias, "grad", torch.ones(3).half()),
}
WRITTEN = "did not come through scale_loss since the last step|the gradients of a part of the model were cleared"
CALLS: dict[str, Change] = {
    "step": lambda loop: loop.optimizer.step(),
    "clip_grad_norm_": lambda loop: xamp.clip_grad_norm_(loop.optimizer, 1.0),
    "clip_grad_value_": lambda loop: xamp.clip_grad_value_(loop.optimizer, 1.0),
    "master_params": lambda loop: xamp.master_params(loop.optimizer),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_on_the_model_is_an_error(call: str, write: str) -> None:
    loop = held_by(Loop(IN_ONE_PASS, norm=False).run(range(2)))
    before = loop.weights()
    WRITES[write](loop)
    with pytest.raises(StateError, match=WRITTEN):
        CALLS[call](loop)
    assert equal(loop.weights(), before)
    assert grads_of(loop) == [None] * 4
    loop.optimizer.zero_grad()
    loop.iterate()
    assert loop.holds()


@pytest.mark.parametrize("write", ["torch's clipping", "a backward"])
def test_what_the_next_scale_loss_finds_on_the_model_is_as_without_one_pass(write: str) -> None:
    loops = pair(norm=False)
    for loop in loops:
        loop.backward()
        WRITES[write](loop)
        loop.backward()
        loop.optimizer.step()
    assert_alike(*loops)


# ---------------------------------------------------------------- copies, versions and places


def test_copies_and_pickles_are_plain_parameters() -> None:
    loop = held_by(Loop(IN_ONE_PASS).run(range(1)))
    ways: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(loop.masters[0]),
        lambda: pickle.loads(pickle.dumps(loop.masters[0])),
        lambda: copy.deepcopy(loop.optimizer).param_groups[0]["params"][0],
    ]
    for way in ways:
        assert type(made := way()) is nn.Parameter
        assert torch.equal(made, loop.masters[0])
        assert vars(made) == {}
        assert loop.holds()


def test_autograd_sees_that_a_step_has_written_the_weights() -> None:
    loop = Loop(IN_ONE_PASS, norm=False).run(range(2))
    late = loop.loss()
    loop.iterate()
    assert loop.holds()
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
