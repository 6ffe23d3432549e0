"""Steps in one pass, by the kernels in Triton's interpreter, against fp64 and against the steps of torch.

Covers: xamp.plans.steps, xamp.plans.layouts, xamp.scaling.one_pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_warnings
from one_pass_loops import AS_TORCH, FORMS, IN_ONE_PASS, Loop, assert_alike, assert_near
from one_rank import one_rank
from stepping import assert_same
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import xamp
from xamp.errors import UnsupportedPolicy
from xamp.plans.steps import Plans, hyper_of
from xamp.scaling.counts import StepOutcome
from xamp.scaling.one_pass import refusal

pytestmark = pytest.mark.usefixtures("interpreter")

LEVELS = ("O2", "O5")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_follows_fp64(level: str, form: str) -> None:
    """The reference steps fp64 parameters by torch's plain loop, with the very gradients that the backwards left."""
    loop = Loop(IN_ONE_PASS, level, form)
    kind, options = FORMS[form]
    exact = [nn.Parameter(master.detach().double()) for master in loop.masters]
    make: Any = kind
    plain = make(exact, **options, foreach=False)
    skips = {0, 3} if level == "O2" else set()
    for number in range(6):
        loop.iterate(number in skips)
        if number in skips:
            continue
        for param, grad in zip(exact, loop.grads[-1], strict=True):
            param.grad = grad
        plain.step()
        assert_near([m.detach() for m in loop.masters], [p.detach().float() for p in exact])
    assert xamp.session(loop.optimizer).stats.skipped == len(skips)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overflows": {"overflows": [0, 2, 3]},
    "accumulates": {"micro": 2, "overflows": [2]},
    "clips": {"clip": 0.1, "overflows": [1]},
    "clips by the largest": {"clip": 0.01, "kind": math.inf},
    "clips by the sum": {"clip": 1.0, "kind": 1.0},
    "accumulates and clips": {"micro": 3, "clip": 0.1},
}


def runs() -> Iterator[Any]:
    """Every run with one form, and with the two others those that differ by rule or level; the rest is thorough."""
    some = {("O2", "momentum", run) for run in ("overflows", "clips", "accumulates and clips")}
    some |= {("O5", "Adam", run) for run in ("plain", "accumulates", "clips by the largest")}
    for level, form in (("O2", "AdamW"), ("O2", "momentum"), ("O5", "Adam")):
        for run in RUNS:
            chosen = form == "AdamW" or (level, form, run) in some
            yield pytest.param(level, form, run, marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("level", "form", "run"), [*runs()])
def test_a_run_is_that_of_torchs_steps(level: str, form: str, run: str) -> None:
    options = {key: value for key, value in RUNS[run].items() if level == "O2" or key != "overflows"}
    ours, theirs = Loop(IN_ONE_PASS, level, form), Loop(AS_TORCH, level, form)
    ours.run(range(6), **options)
    assert ours.holds() == (options.get("micro", 1) == 1)
    theirs.run(range(6), **options)
    assert_alike(ours, theirs)
    assert_near(ours.norms, theirs.norms, 1e-5)


def test_clipping_twice_clips_what_was_clipped() -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.run(range(2))
        loop.optimizer.zero_grad()
        loop.backward()
        loop.norms = [xamp.clip_grad_norm_(loop.optimizer, limit) for limit in (0.1, 0.05, 10.0)]
        loop.norms.append(torch.tensor(xamp.session(loop.optimizer).metrics()["grad_norm"]))
    assert loops[0].holds()
    assert_near(loops[0].norms, loops[1].norms, 1e-5)
    for loop in loops:
        loop.optimizer.step()
    assert_alike(*loops)


def test_a_skipped_first_step_leaves_no_state_and_any_skipped_step_changes_no_bit() -> None:
    loop = Loop(IN_ONE_PASS, form="momentum")
    before = loop.weights()
    loop.iterate(overflow=True)
    assert loop.moments() == {}
    assert all(map(torch.equal, loop.weights(), before))
    loop.iterate()
    kept, moments = loop.weights(), loop.moments()
    loop.iterate(overflow=True)
    assert loop.holds()
    assert all(map(torch.equal, loop.weights(), kept))
    assert all(torch.equal(value, moments[key]) for key, value in loop.moments().items())
    assert loop.counted()[1:3] == (1, 2)


def test_frozen_parameters_stay_and_join_later() -> None:
    loops = [Loop(fused, form=form) for form in ("AdamW", "momentum") for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.model[0].weight.requires_grad_(False)
        loop.run(range(2))
        loop.model[0].weight.requires_grad_(True)
        loop.model[3].bias.requires_grad_(False)
        loop.run(range(3), overflows=[1])
    assert_alike(loops[0], loops[1])
    assert_alike(loops[2], loops[3])


def test_a_group_that_is_added_joins() -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    added = [nn.Parameter(torch.linspace(-1.0, 1.0, 7).to(torch.float16)) for _ in loops]
    for loop, param in zip(loops, added, strict=True):
        loop.run(range(2))
        loop.optimizer.zero_grad()
        loop.optimizer.add_param_group({"params": [param], "lr": 0.5})
        for _ in range(3):
            loop.optimizer.zero_grad()
            with xamp.scale_loss(loop.loss() + param.float().square().sum(), loop.optimizer) as scaled:
                scaled.backward()
            loop.optimizer.step()
    assert loops[0].holds()
    assert torch.equal(added[0], added[1])
    assert_alike(loops[0], loops[1])


def test_several_losses_have_their_scales() -> None:
    loops = [Loop(fused, num_losses=2) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        for number in range(6):
            loop.optimizer.zero_grad()
            loop.backward(number == 2, loss_id=0)
            loop.backward(number == 4, loss_id=1)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.backward(loss_id=number % 2)
            loop.optimizer.step()
    assert loops[0].holds()
    assert_alike(loops[0], loops[1])


def test_two_optimizers_step_in_one_pass_each() -> None:
    made = []
    for fused in (IN_ONE_PASS, AS_TORCH):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        pair: Any = [
            torch.optim.AdamW(model[0].parameters(), lr=0.01, eps=1e-4),
            torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5),
        ]
        xamp.initialize(model, pair, "O2", fused=fused, init_scale=2.0**10, verbosity=0)
        for number in range(5):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
            for optimizer in pair:
                optimizer.zero_grad()
            with xamp.scale_loss(model(x).square().mean() * (1e30 if number == 3 else 1.0), pair) as scaled:
                scaled.backward()
            for optimizer in pair if number % 2 else pair[::-1]:
                optimizer.step()
        made.append(([p.detach().clone() for p in model.parameters()], xamp.loss_scale(pair[0])))
    assert made[0][1] == made[1][1]
    assert_near(made[0][0], made[1][0])


@pytest.mark.parametrize("first", [IN_ONE_PASS, AS_TORCH])
@pytest.mark.parametrize(
    ("level", "form"), [("O2", "AdamW"), ("O2", "momentum"), ("O5", "amsgrad"), ("O5", "nesterov")]
)
def test_a_checkpoint_moves_between_the_two_ways(level: str, form: str, first: str) -> None:
    """Bit for bit: what is loaded, and saved again, is what was saved, whichever way made it and goes on from it.

    The states are saved with gradients of a next step on the model, which are no part of them.
    """
    other = AS_TORCH if first == IN_ONE_PASS else IN_ONE_PASS
    run = Loop(first, level, form).run(range(4), overflows=[1] if level == "O2" else [])
    clean = run.saved()
    run.optimizer.zero_grad()
    run.backward()
    saved = run.saved()
    assert run.holds() == (first == IN_ONE_PASS)
    assert_same(saved[1:], clean[1:])  # the forward has moved the statistics of the batch norm
    resumed = Loop(other, level, form)
    resumed.load(saved)
    assert_same(resumed.saved(), saved)
    assert_same(resumed.weights(), run.weights())
    assert_same(resumed.moments(), run.moments())
    resumed.made = run.made
    run.run(range(3))
    resumed.run(range(3))
    assert_alike(resumed, run)


def test_a_run_goes_back_to_a_checkpoint_bit_for_bit() -> None:
    """With gradients of the last step on the model: they are looked at when the optimizer is asked for its form."""
    run = Loop(IN_ONE_PASS, form="momentum").run(range(3))
    saved, made = run.saved(), run.made
    run.run(range(3))
    first = run.weights()
    run.load(saved)
    run.made = made
    run.run(range(3))
    assert run.holds()
    assert all(map(torch.equal, run.weights(), first))


@pytest.mark.parametrize("change", ["nothing", "multiplied", "replaced", "cleared"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_without_a_master_are_what_a_script_made_of_them(level: str, change: str) -> None:
    """They are on the model, unscaled, and may change before they are clipped; clipping shows there too."""
    pair = [Loop(way, level) for way in (IN_ONE_PASS, AS_TORCH)]
    for number in range(3):
        for loop in pair:
            loop.optimizer.zero_grad()
            loop.backward()
            weight: Any = loop.model[1].weight
            if change == "multiplied":
                weight.grad.mul_(3.0)
            elif change != "nothing":
                weight.grad = weight.grad * 2.0 if change == "replaced" else None
            loop.norms += [xamp.clip_grad_norm_(loop.optimizer, limit) for limit in (0.5, 0.1)]
        first, second = ([p.grad for p in loop.model[1].parameters()] for loop in pair)
        for found, wanted in zip(first, second, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
        assert pair[0].holds(), number
        for loop in pair:
            loop.optimizer.step()
    torch.testing.assert_close(torch.stack(pair[0].norms), torch.stack(pair[1].norms), rtol=1e-5, atol=0.0)
    assert_near(pair[0].weights(), pair[1].weights(), 1e-5)


@pytest.mark.parametrize(("clip", "most"), [(None, 6), (0.1, 8)])
def test_a_step_has_so_few_launches(clip: float | None, most: int) -> None:
    """Of any kind, for any number of tensors and groups: two combinations of dtypes, fp16 and a batch norm's fp32."""
    loop = Loop(IN_ONE_PASS)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float16))], "lr": 0.5})
    for _ in range(4):
        loop.iterate(clip=clip)
    stepped = loop.state.gradients.params.stepped
    plan, _ = loop.state.gradients.one_pass._plans.stepper(loop.optimizer, [None] * len(stepped))
    assert 0 < plan.launches <= most


def test_the_class_of_an_optimizer_decides() -> None:
    class Own(torch.optim.AdamW):
        pass

    for make, words in (
        (torch.optim.RMSprop, "fused"),
        (Own, "fused"),
        (lambda params, **options: torch.optim.AdamW(params, foreach=True, **options), "fused"),
    ):
        model = nn.Linear(4, 2)
        optimizer: Any = make(model.parameters(), lr=0.1)
        with pytest.raises(UnsupportedPolicy, match=f"fused='one-pass'.*cannot step in one pass: .*{words}"):
            xamp.initialize(model, optimizer, "O2", fused="one-pass", verbosity=0)
        assert model.weight.dtype == torch.float32


def test_a_level_without_masters_has_no_one_pass() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UnsupportedPolicy, match="there are no masters"):
        xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", fused="one-pass", verbosity=0)


@torch_warnings.FSDP1
def test_a_part_in_shards_keeps_all_from_one_pass() -> None:
    """One rank would take the norm of its part of a tensor for the whole one's."""
    with one_rank():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        alone: Any = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
        model[0] = FullyShardedDataParallel(model[0], use_orig_params=True, **alone)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UnsupportedPolicy, match="parameters are sharded"):
            xamp.initialize(model, optimizer, "O2", fused="one-pass", verbosity=0)


def test_parameters_elsewhere_than_the_scale_keep_from_one_pass() -> None:
    loop = Loop(IN_ONE_PASS)
    given = loop.optimizer, loop.state.fused, loop.state.gradients.params
    assert refusal(*given, torch.device("cpu"), gradients_tell=True) == ""
    assert refusal(*given, torch.device("meta"), gradients_tell=True) == "parameters are on several devices"
    assert refusal(*given, torch.device("cpu"), gradients_tell=False) == "the chip tells of an overflow by a flag"


def test_a_form_without_kernel_is_named_though_it_skips_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.AdamW):
        pass

    def told(optimizer: Any) -> str:
        with pytest.raises(UnsupportedPolicy, match="cannot step in one pass") as raised:
            xamp.initialize(model, optimizer, "O2", fused="one-pass", verbosity=0)
        return str(raised.value)

    model = nn.Linear(4, 2)
    assert "Own has no kernel; SGD, Adam, AdamW of torch.optim have" in told(Own(model.parameters(), fused=True))
    groups = [{"params": [p], "decoupled_weight_decay": p is model.bias} for p in model.parameters()]
    assert "its groups disagree on decoupled_weight_decay" in told(torch.optim.Adam(groups))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "Triton has no kernels for a CPU" in told(torch.optim.Adam(model.parameters()))


def test_the_host_decides_on_a_first_step_only() -> None:
    """The outcome of any other is on the device, where nobody waits for it."""
    loop = Loop(IN_ONE_PASS)
    told = []
    for _ in range(3):
        loop.iterate()
        told.append(type(loop.state.outcomes.last))
    assert told == [StepOutcome, torch.Tensor, torch.Tensor]


def test_a_learning_rate_on_a_device_is_not_read() -> None:
    rate = torch.empty((), device="meta")
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    optimizer: Any = torch.optim.SGD([{"params": [param]} for param in params], lr=0.5)
    optimizer.param_groups[1]["lr"] = rate
    assert [group["lr"] for group in hyper_of(optimizer)] == [0.5, rate]
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert [type(group["lr"]) for group in hyper_of(optimizer)] == [float, float]


def test_options_are_read_again_when_one_has_changed() -> None:
    optimizer: Any = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    group, plans = optimizer.param_groups[0], Plans(torch.optim.AdamW, [], [], lambda *_: pytest.fail("a plan"))
    assert plans.hyper(optimizer)[0]["lr"] == 0.5
    assert plans.hyper(optimizer) is plans.hyper(optimizer)
    group["betas"] = 0.5, 0.75
    assert plans.hyper(optimizer)[0]["betas"] == (0.5, 0.75)
    group["lr"] = rate = torch.tensor(0.5)  # the same number, and it changes in place
    assert plans.hyper(optimizer)[0]["lr"] == 0.5
    rate.fill_(0.25)
    assert plans.hyper(optimizer)[0]["lr"] == 0.25


@pytest.mark.parametrize("fused", ["auto", True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_nobody_steps_so_who_has_not_asked(level: str, fused: Any) -> None:
    """The kernels run here."""
    loop = Loop(fused, level).run(range(2))
    loop.backward()
    assert loop.state.gradients.one_pass is None
    assert not loop.holds()


def test_what_ends_the_pass_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(IN_ONE_PASS)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "foreach": True})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "AdamW no longer steps in one pass, as fused='one-pass' asks, but as torch steps it: a group is not "
        "fused, so the host decides on its steps."
    )
    loop.run(range(2))
    assert not loop.holds()
