"""A model trains inside any region of the code around it as it does without one, bit for bit.

Covers: xamp.casting.active, xamp.casting.outside.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from gathering import cases
from noting import noted_in_backward
from torch import nn

import xamp
from xamp.casting import active

STEPS = 6
Around = Callable[[], contextlib.AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Another one takes 100 times as long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """A net that uses one weight twice, and normalises, which the portable policy and the device's own differ on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(torch.tanh(self.first(x)))))


@contextlib.contextmanager
def in_several(regions: Iterable[Around]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        yield


@contextlib.contextmanager
def counted_as_left() -> Iterator[None]:
    """Bring torch's count of regions back to what it was: a compiled region that raises is not counted as left."""
    before = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        now = torch.autocast_decrement_nesting()
        for _ in range(abs(now - before + 1)):
            (torch.autocast_decrement_nesting if now >= before else torch.autocast_increment_nesting)()


def raises_in(region: Around) -> None:
    """Enter a region and leave it by an exception."""
    with contextlib.suppress(ArithmeticError), region():
        raise ArithmeticError


def batches(region: Around, data: list[Any]) -> Iterator[Any]:
    """Yield the batches from within a region."""
    with region():
        yield from data


def train(level: str, plan: Plan, change: Callable[[Any, int], None] | None = None, **options: Any) -> list[Any]:
    """Train for some steps in the regions of ``plan``; return each loss, and the weights at the end."""
    torch.manual_seed(0)
    net: Any = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    xamp.initialize(net, optimizer, level=level, init_scale=2.0**8, verbosity=0, **options)
    target = torch.randn(8, 4)
    data = [(x, x @ target) for x in torch.randn(2 * STEPS, 8, 8)]
    losses = []
    with in_several(plan.outer):
        for step, pair in enumerate(batches(plan.batches, [data[at : at + 2] for at in range(0, 2 * STEPS, 2)])):
            for region in plan.left:
                raises_in(region)
            with in_several(plan.inner):
                optimizer.zero_grad()
                for x, y in pair:
                    loss = (net(x).float() - y).square().mean()
                    with xamp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                    losses.append(loss.item())
                xamp.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
            if change is not None:
                change(net, step)
    return [*losses, *(p.detach().float().clone() for p in net.parameters())]


class Plan:
    """Regions: around the loop, in each iteration, around what yields the batches, and left by an exception."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.outer: list[Around] = []
        self.inner: list[Around] = []
        self.left: list[Around] = []
        self.batches: Around = contextlib.nullcontext
        self.told: list[str] = []
        if draw is not None:
            for place in (self.outer, self.inner, self.left):
                place += [self._drawn(draw) for _ in range(draw.choice((0, 1, 1, 2)))]
            if draw.random() < 0.3:
                self.batches = self._drawn(draw)

    def _drawn(self, draw: random.Random) -> Around:
        ours, dtype = draw.random() < 0.5, draw.choice((torch.float16, torch.bfloat16))
        options: Any = {"enabled": draw.random() < 0.7, "cache_enabled": draw.choice((True, True, False, None))}
        self.told.append(f"{'xamp' if ours else 'torch'}.autocast({dtype}, {options})")
        if ours:
            return lambda: xamp.autocast(dtype=dtype, **options)
        return lambda: torch.autocast("cpu", dtype=dtype, **options)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, wanted, strict=True))


def plan_of(**places: Any) -> Plan:
    plan = Plan()
    vars(plan).update(places)
    return plan


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_loop_in_random_regions_is_the_loop_without_them(level: str) -> None:
    check_random_regions(level, range(40 if level in ("O1", "O4") else 8))


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_long_loop_in_300_random_regions(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STEPS", 20)
    check_random_regions(level, range(300))


def check_random_regions(level: str, seeds: Iterable[int]) -> None:
    options: Any = {"op_policy": "native"} if level == "O4" else {}
    wanted = train(level, Plan(), **options)
    assert wanted[0] != wanted[2 * STEPS - 2]
    with cases() as case:
        for seed in seeds:
            plan = Plan(random.Random(seed))
            with case(f"seed {seed}: {plan.told}"):
                assert_same(train(level, plan, **options), wanted)
                assert not torch.is_autocast_enabled("cpu")
                assert active.innermost() is None


KINDS: dict[str, Around] = {
    "torch's": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch's, off": lambda: torch.autocast("cpu", enabled=False),
    "torch's, of another device": lambda: torch.autocast("xpu", enabled=False),
    "xamp's": xamp.autocast,
    "xamp's, off": lambda: xamp.autocast(enabled=False),
    "a session's": lambda: xamp.session(xamp.initialize(nn.Linear(2, 2), level="O4", verbosity=0)).autocast(),
    "not counted as left": lambda: contextlib.nullcontext(torch.autocast_increment_nesting()),
    "counted as left twice": lambda: contextlib.nullcontext([torch.autocast_decrement_nesting() for _ in range(3)]),
}


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_region_around_the_loop(kind: str, level: str) -> None:
    wanted = train(level, Plan())
    with counted_as_left():
        assert_same(train(level, plan_of(outer=[KINDS[kind]])), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_in_a_region_around_the_loop(backend: str) -> None:
    def compiled(net: Any, step: int) -> None:
        if step == 0:
            net.compile(backend=backend)
        with torch.no_grad():  # a write by hand, of which no step tells
            net.last.weight.mul_(1.25)

    wanted = train("O4", Plan(), compiled)
    assert_same(train("O4", plan_of(outer=[KINDS["torch's, off"]]), compiled), wanted)
    assert_same(train("O4", plan_of(outer=[KINDS["torch's"]]), compiled), wanted)


def test_training_after_a_compiled_region_that_raised() -> None:
    wanted = train("O4", Plan())

    @torch.compile(backend="eager")
    def fails(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.linalg.cholesky((x @ x).float() - 100 * torch.eye(4))

    with counted_as_left():
        with pytest.raises(RuntimeError):
            fails(torch.ones(4, 4))
        assert_same(train("O4", Plan()), wanted)


def _loads(net: Any, _: int) -> None:
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})


def _writes(net: Any, _: int) -> None:
    with torch.no_grad():
        net.first.weight.copy_(net.first.weight * 0.9)


def _evaluates(net: Any, step: int) -> None:
    """Evaluate with other weights, and put the first back."""
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict({name: value * 0.5 for name, value in kept.items()})
    with torch.no_grad():
        net(torch.ones(2, 8))
    net.load_state_dict(kept)
    with torch.inference_mode():
        net(torch.ones(2, 8))


@pytest.mark.parametrize("change", [_loads, _writes, _evaluates])
@pytest.mark.parametrize("kind", ["torch's", "torch's, off", "xamp's"])
def test_a_forward_takes_weights_that_were_written_between_steps(kind: str, change: Any) -> None:
    assert_same(train("O4", plan_of(outer=[KINDS[kind]]), change), train("O4", Plan(), change))


def managed(level: str) -> tuple[Any, torch.optim.Optimizer]:
    """A layer and its optimizer."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    xamp.initialize(net, optimizer, level=level, verbosity=0)
    return net, optimizer


# ---------------------------------------------------------------- by hand


def by_hand(plan: Plan, dtype: torch.dtype, *, region: bool) -> list[Any]:
    """Train with ``xamp.GradScaler``, in a region in each iteration or, with ``region=False``, in that of the plan."""
    torch.manual_seed(0)
    net = Net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), xamp.GradScaler(init_scale=2.0**8)
    losses = []
    with in_several(plan.outer):
        for _ in range(STEPS):
            with in_several(plan.inner):
                x = torch.ones(4, 8).cumsum(1) / 8
                optimizer.zero_grad()
                with xamp.autocast(dtype=dtype) if region else contextlib.nullcontext():
                    loss = net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return [*losses, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_by_hand_a_region_in_the_loop_is_one_without_the_region_around(dtype: torch.dtype) -> None:
    wanted = by_hand(Plan(), dtype, region=True)
    with cases() as case:
        for seed in range(25):
            drawn = Plan(random.Random(seed))
            with case(f"seed {seed}: {drawn.told}"):  # the backward is outside of these
                assert_same(by_hand(plan_of(inner=[*drawn.outer, *drawn.inner]), dtype, region=True), wanted)
    for around in (xamp.autocast(dtype=dtype), torch.autocast("cpu", dtype, False)):
        assert_same(by_hand(plan_of(outer=[lambda: around]), dtype, region=True), wanted)  # noqa: B023


@pytest.mark.parametrize("enabled", [True, False])
def test_by_hand_one_region_around_the_loop_casts_anew_after_each_step(enabled: bool) -> None:
    """The scaler's step is what tells: torch's own would leave the first casts."""
    around = plan_of(outer=[lambda: xamp.autocast(dtype=torch.bfloat16, enabled=enabled)])
    found = by_hand(around, torch.bfloat16, region=False)
    if enabled:
        assert_same(found, by_hand(Plan(), torch.bfloat16, region=True))
    assert found[0] != found[STEPS - 1]


def test_weights_written_by_hand_within_one_region_need_the_cache_off() -> None:
    """What the docs say of it."""
    weight, seen = nn.Parameter(torch.ones(2, 2)), []
    for cached in (True, False):
        with xamp.autocast(cache_enabled=cached):
            for _ in range(2):
                seen.append((torch.ones(2, 2) @ weight)[0, 0].item())
                with torch.no_grad():
                    weight.mul_(2)
    assert seen == [2.0, 2.0, 8.0, 16.0]


# ---------------------------------------------------------------- code in a region, beside a model


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("what", ["scale_loss", "step", "forward", "region"])
def test_code_in_a_region_around_the_loop_casts_a_weight_anew_after(what: str, level: str) -> None:
    """A weight that is used beside the model, in a criterion: after each of these its casts are made anew."""
    net, optimizer = managed(level)
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    net(x).sum().backward if what == "scale_loss" else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = [(x @ weight)[0, 0].item()]
        with torch.no_grad():
            weight.mul_(2)
        seen.append((x @ weight)[0, 0].item())
        if what == "scale_loss":
            with xamp.scale_loss(net(x).sum() if level == "O0" else torch.ones(()), optimizer):
                pass
        elif what == "step":
            optimizer.step() if level == "O0" else _step(net, optimizer)
        elif what == "forward":
            net(x)
        else:
            with xamp.autocast():
                pass
        seen.append((x @ weight)[0, 0].item())
    wanted = [2.0, 2.0, 4.0]
    if what == "forward" and level == "O0":
        wanted = seen  # it enters no region that casts
    assert seen == wanted


def _step(net: Any, optimizer: Any) -> None:
    with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_a_cast_of_a_model_is_none_for_the_region_around() -> None:
    """torch's cache does not know for which dtype a cast was made."""
    net = xamp.initialize(nn.Linear(2, 2, bias=False), level="O1", verbosity=0)
    x = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
        assert (x @ net.weight).dtype is torch.bfloat16
        net(x)


# ---------------------------------------------------------------- a backward in scale_loss


def state_of_autocast() -> Any:
    return torch.is_autocast_enabled("cpu"), active.get_slot(), active.innermost()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("kind", ["torch's", "xamp's", "xamp's, off", "a session's"])
def test_a_backward_in_scale_loss_runs_in_no_region_and_the_region_goes_on(kind: str, level: str) -> None:
    net, optimizer = managed(level)
    noted, seen = noted_in_backward(state_of_autocast)
    with KINDS[kind]():
        before = state_of_autocast()
        loss = noted(net(torch.ones(2, 2))).sum()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert state_of_autocast() == before
    assert seen == [(False, None, None)]


class Multiplies(torch.optim.SGD):
    """An optimizer that multiplies matrices, as Shampoo and Muon do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * (param.grad @ param.grad.T @ param.grad))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_step_runs_in_no_region_either(level: str) -> None:
    def trained(around: Around) -> Any:
        torch.manual_seed(0)
        net: Any = nn.Linear(8, 8, bias=False)
        optimizer = Multiplies(net.parameters(), lr=0.1)
        xamp.initialize(net, optimizer, level=level, verbosity=0)
        with around():
            for _ in range(2):
                optimizer.zero_grad()
                with xamp.scale_loss(net(torch.randn(4, 8)).square().sum(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        return net.state_dict()["weight"]

    assert torch.equal(trained(KINDS["torch's"]), trained(contextlib.nullcontext))


def test_a_closure_runs_in_the_region_around() -> None:
    net: Any = nn.Linear(2, 2)
    optimizer = Multiplies([net.weight], lr=0.1)
    xamp.initialize(net, optimizer, level="O4", verbosity=0)
    seen = []

    def closure() -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        optimizer.zero_grad()
        loss = net(torch.ones(2, 2)).sum()
        loss.backward()
        return loss

    with torch.autocast("cpu"):
        optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True]


def test_regions_that_are_entered_or_left_in_the_block_stay_so() -> None:
    net, optimizer = managed("O4")
    around, inner = torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16)
    with around:
        with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
            scaled.backward()
            inner.__enter__()
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
        inner.__exit__(None, None, None)
    around.__enter__()
    with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        around.__exit__(None, None, None)
    assert not torch.is_autocast_enabled("cpu")


def test_casts_that_are_disabled_around_a_block_are_disabled_in_it() -> None:
    net, optimizer = managed("O1")
    x = torch.randn(2, 2)
    with xamp.disable_casts(), xamp.scale_loss(net(x).sum(), optimizer) as scaled:
        scaled.backward()
        assert torch.equal(net(x), nn.functional.linear(x, net.weight, net.bias))
    assert not torch.equal(net(x), nn.functional.linear(x, net.weight, net.bias))


def test_a_body_that_raises_leaves_the_region_around_as_it_was() -> None:
    net, optimizer = managed("O1")
    with xamp.autocast(dtype=torch.bfloat16):
        mark = active.innermost()
        with pytest.raises(ArithmeticError), xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer):  # noqa: PT012
            assert active.innermost() is None
            raise ArithmeticError
        assert torch.is_autocast_enabled("cpu")
        assert active.innermost() is mark


REGIONS: list[Around] = [
    contextlib.nullcontext,
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: xamp.autocast(dtype=torch.bfloat16),
    lambda: xamp.autocast(dtype=torch.float16),
]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_norms_in_a_region_are_those_without_it(level: str, enabled: bool) -> None:
    """Of 16-bit gradients torch computes another norm in a region, or none at all."""
    found = []
    for region in REGIONS:
        torch.manual_seed(0)
        net: Any = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        xamp.initialize(net, optimizer, level, init_scale=256.0, verbosity=0, enabled=enabled)
        x = torch.randn(8, 8)
        with xamp.scale_loss(net(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        metrics = xamp.session(optimizer).metrics
        with region():
            logged = metrics()
            norms = [xamp.clip_grad_norm_(optimizer, 0.5, norm_type) for norm_type in (2.0, 1.0, float("inf"))]
            xamp.clip_grad_value_(optimizer, 0.01)
        grads = [p.grad.clone() for p in xamp.master_params(optimizer) if p.grad is not None]
        logged_values = (torch.tensor(value).nan_to_num(-1.0) for value in logged.values())  # a disabled one logs nan
        found.append([*logged_values, *norms, *grads])
    for each in found[1:]:
        assert [value.dtype for value in each] == [value.dtype for value in found[0]]
        assert_same(each, found[0])


def in_threads(run: Callable[[str], list[Any]], levels: list[str]) -> list[list[Any]]:
    """Call ``run`` for each of the levels in a thread of its own, all at once."""
    found: dict[int, list[Any]] = {}
    begin = threading.Barrier(len(levels))

    def work(index: int) -> None:
        begin.wait(60)
        found[index] = run(levels[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(levels))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [found[index] for index in range(len(levels))]


@pytest.mark.parametrize("levels", [["O1", "O4"], ["O4", "O2"], ["O3", "O5"], ["O1", "O1"]], ids="-".join)
@pytest.mark.parametrize("region", REGIONS[:2], ids=["none", "around"])
def test_threads_that_train_at_once_train_as_alone(levels: list[str], region: Around) -> None:
    """No weight is used twice in a forward: all threads share torch's cache of casts, and may clear it in between."""

    def run(level: str) -> list[Any]:
        draw = torch.Generator().manual_seed(ord(level[1]))
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.randn(param.shape, generator=draw) * 0.2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        xamp.initialize(net, optimizer, level, init_scale=256.0, verbosity=0)
        losses = []
        with region():
            for step in range(200):
                optimizer.zero_grad()
                loss = net(torch.randn(8, 8, generator=draw)).float().square().mean()
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                xamp.clip_grad_norm_(optimizer, 0.5)
                optimizer.step()
                losses.append(loss.item())
                if step % 20 == 10:
                    net.eval()
                    with torch.no_grad():
                        losses.append(net(torch.ones(2, 8)).sum().item())
                    net.train()
        return [*losses, *(p.detach().float().clone() for p in net.parameters())]

    alone = [run(level) for level in levels]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        together = in_threads(run, levels)
    finally:
        sys.setswitchinterval(interval)
    for found, wanted in zip(together, alone, strict=True):
        assert_same(found, wanted)
