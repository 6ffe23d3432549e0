"""GradScaler as training scripts use it: subclassed, wrapped, asked before and after, over many optimizers.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from lanes import Lane
from scaler_comparison import beside_torch, data, net, note, spoil
from stepping import assert_same, at
from torch import nn
from torch.optim import SGD, AdamW

import xamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def clipped(base: Any) -> Any:
    """A scaler of class ``base`` that holds its scale below a bound, by what a subclass finds in torch's."""

    class Clipped(base):  # type: ignore[misc]
        highest = 64.0

        def scale(self, outputs: Any) -> Any:
            if not self._enabled:
                return outputs
            if self.get_scale() > self.highest:
                self._scale.fill_(self.highest)
            self.set_growth_factor(2.0 if self.get_scale() < self.highest else 1.0)
            if isinstance(outputs, torch.Tensor):
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(outputs.device)
                return outputs * self._scale.to(device=outputs.device, non_blocking=True)
            return super().scale([outputs])[0]

    return Clipped


def train(scaler: Any, count: int = 24) -> Any:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for index in range(count):
        optimizer.zero_grad()
        scaler.scale(model(data(index)).square().mean()).backward()
        if index % 6 == 3:
            spoil(model.parameters())
        scaler.step(optimizer)
        if index == 12:
            scaler.update(4096.0)
        else:
            scaler.update()
        seen.append(note(scaler, model))
    return seen


def test_a_subclass_with_a_scale_of_its_own() -> None:
    found = []
    options = {"init_scale": 16, "growth_interval": 2}
    for base, options_of_base in ((xamp.GradScaler, options), (torch.amp.GradScaler, {"device": "cpu", **options})):
        scaler: Any = clipped(base)(**options_of_base)
        torch.manual_seed(0)
        assert [scaler._scale, scaler._growth_tracker] == [None, None]
        found.append(train(scaler))
        with pytest.raises(AssertionError):  # which would forget the scale
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert scaler._growth_tracker.dtype == torch.int32
    assert_same(*found)
    highest = [record[0] for record in found[0]]
    assert max(highest[:12]) == 64.0
    assert highest[12] == 4096.0
    assert highest[13] == 64.0


def test_a_subclass_whose_scale_calls_the_bases_is_not_called_again_for_each_item() -> None:
    class Halves(xamp.GradScaler):
        calls = 0

        def scale(self, outputs: Any) -> Any:
            self.calls += 1
            return super().scale([output / 2 for output in outputs])

    scaler = Halves(init_scale=8.0)
    assert [float(t) for t in scaler.scale([torch.ones(()), torch.tensor(3.0)])] == [4.0, 12.0]
    assert scaler.calls == 1


def test_writing_to_the_scale_counts_at_once() -> None:
    def run(scaler: Any) -> Any:
        weight = nn.Parameter(torch.ones(2))
        optimizer = SGD([weight], lr=0.125)
        scaler.scale(torch.ones(()))
        scaler._scale.fill_(32.0)
        scaled = scaler.scale(weight.sum())
        scaled.backward()
        scaler.step(optimizer)
        scaler._growth_tracker.fill_(7)
        scaler.update()
        return scaled.detach(), weight.detach(), scaler.state_dict()

    found = beside_torch(run, growth_interval=100)
    assert found[1].tolist() == [0.875, 0.875]
    assert found[2]["_growth_tracker"] == 8


def test_the_floor_holds_for_a_scale_that_was_written(lane: Lane) -> None:
    """Under a fused optimizer, whose scale the host does not read at every step."""
    scaler: Any = xamp.GradScaler(init_scale=1024.0)
    weight = nn.Parameter(torch.ones(2, device=lane.device))
    optimizer = AdamW([weight], fused=True)
    for overflow in (False, True, True):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if overflow:
            spoil([weight], lane=lane)
            scaler._scale.fill_(1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["initialize", "scaler"])
def test_an_optimizer_that_initialize_manages_is_refused(level: str, first: str, lane: Lane) -> None:
    model = net(device=lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    scaler = xamp.GradScaler(init_scale=8.0)

    def one() -> None:
        optimizer.zero_grad()
        scaler.scale(model(data(0, lane.device)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    if first == "scaler":
        one()
    xamp.initialize(model, optimizer, **at(level))
    scaler.scale(torch.ones((), device=lane.device))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(
            xamp.StateError, match=r"xamp.initialize manages this optimizer .*xamp.session\(optimizer\).close"
        ):
            call(optimizer)
    xamp.session(model).close()
    before = [p.detach().clone() for p in model.parameters()]
    one()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_disabled_session_or_a_disabled_scaler_refuses_nothing(lane: Lane) -> None:
    model = net(device=lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", enabled=False)
    scaler = xamp.GradScaler(init_scale=8.0)
    scaler.scale(model(data(0, lane.device)).square().mean()).backward()
    scaler.step(optimizer)
    assert scaler.last_step.name == "APPLIED"
    other = net(device=lane.device)
    managed = SGD(other.parameters(), lr=0.125)
    xamp.initialize(other, managed, "O1", verbosity=0)
    with xamp.scale_loss(other(data(0, lane.device)).square().mean(), managed) as scaled:
        xamp.GradScaler(enabled=False).scale(scaled).backward()
    xamp.GradScaler(enabled=False).step(managed)
    assert xamp.session(managed).last_step.name == "APPLIED"  # type: ignore[union-attr]


def test_a_model_that_initialize_prepared_without_an_optimizer(lane: Lane) -> None:
    """O1 for the forward, the step by hand."""
    if "O1" not in lane.can.levels:
        pytest.skip(f"{lane} cannot run O1")
    model = net(device=lane.device)
    xamp.initialize(model, level="O1", verbosity=0)
    optimizer = SGD(model.parameters(), lr=0.125)
    scaler = xamp.GradScaler(init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(data(0, lane.device)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_what_has_param_groups_and_step_is_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))

    class Looks:
        param_groups = ({"params": [weight]},)
        steps = 0

        def step(self) -> None:
            self.steps += 1

    scaler, looks = xamp.GradScaler(init_scale=4.0), Looks()
    scaler.scale(weight.sum()).backward()
    scaler.step(looks)  # type: ignore[arg-type]
    scaler.update()
    assert looks.steps == 1
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]


def test_the_scale_may_be_assigned_as_many_scripts_do() -> None:
    scaler = xamp.GradScaler(init_scale=4.0)
    weight = nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum())
    scaler._scale = torch.tensor(128.0)
    assert scaler.get_scale() == 128.0
    assert float(scaler.scale(torch.ones(()))) == 128.0


def test_it_is_torchs() -> None:
    for enabled in (True, False):
        scaler = xamp.GradScaler(enabled=enabled)
        assert isinstance(scaler, torch.cuda.amp.GradScaler)
        assert isinstance(scaler, torch.amp.GradScaler)
        assert scaler.is_enabled() is enabled


def hands_on(base: Any) -> Any:
    """Calls the methods of the base, and notes in which order it was called itself."""

    class Notes(base):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.calls: list[str] = []

        def _unscale_grads_(self, *args: Any) -> Any:
            self.calls.append("unscale")
            return super()._unscale_grads_(*args)

        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("step")
            return super()._maybe_opt_step(*args, **kwargs)

    return Notes


def does_all(base: Any) -> Any:
    """Unscales and steps by itself, and gives the flags that it found."""

    class Own(base):  # type: ignore[misc]
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            del allow_fp16
            flag = torch.zeros_like(found_inf)
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(inv_scale)
                flag = torch.maximum(flag, (~param.grad.isfinite().all()).float())
            return {flag.device: flag}

        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
                return None
            return optimizer.step(*args, **kwargs)

    return Own


def asks_first(base: Any) -> Any:
    """Skips steps with large gradients as well, which torch's asks before a fused step."""

    class Asks(base):  # type: ignore[misc]
        def _check_inf_per_device(self, optimizer: Any) -> Any:
            found = super()._check_inf_per_device(optimizer)
            for param in optimizer.param_groups[0]["params"]:
                for flag in found.values():
                    flag.masked_fill_(param.grad.abs().max() > 0.9 * self._scale, 1.0)
            return found

    return Asks


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [hands_on, does_all, asks_first])
def test_methods_that_a_subclass_overrides_are_called_as_torchs_are(make: Any, fused: bool) -> None:
    found: list[Any] = []
    for base, options in ((xamp.GradScaler, {}), (torch.amp.GradScaler, {"device": "cpu"})):
        scaler = make(base)(init_scale=16.0, growth_interval=2, **options)
        torch.manual_seed(0)
        model, seen = net(), []
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        for index in range(12):
            optimizer.zero_grad()
            scaler.scale(model(data(index)).square().mean()).backward()
            if index % 4 == 2:
                spoil(model.parameters())
            if index % 3 == 1:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append((note(scaler, model), scaler.calls[:] if make is hands_on and not fused else None))
        found.append(seen)
        if base is xamp.GradScaler:
            assert scaler.stats.skipped >= 3
            assert scaler.stats.applied + scaler.stats.skipped == 12
    assert_same(*found)


def test_the_states_of_an_iteration_are_where_torch_has_them() -> None:
    def run(scaler: Any) -> Any:
        weight = nn.Parameter(torch.ones(2))
        optimizer = SGD([weight], lr=0.125)
        scaler.scale(weight.sum()).backward()
        stages = []
        for call in (lambda: None, lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
            call()
            use = scaler._per_optimizer_states[id(optimizer)]
            flags = {str(device): float(flag) for device, flag in use["found_inf_per_device"].items()}
            stages.append(
                (use["stage"].name, flags, scaler._found_inf_per_device(optimizer) == use["found_inf_per_device"])
            )
        return stages

    assert run(xamp.GradScaler()) == run(torch.amp.GradScaler("cpu"))


def test_ranks_can_share_the_flag_by_hand() -> None:
    scaler = xamp.GradScaler(init_scale=4.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)  # another rank's, by all_reduce
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 2.0


def test_a_scale_that_cannot_fall_collapses_too() -> None:
    scaler = xamp.GradScaler(init_scale=4.0)
    scaler.set_backoff_factor(1.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(49):
        scaler.scale(weight.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(xamp.LossScaleCollapsed):
        scaler.step(optimizer)


def test_a_group_stays_out_of_a_copy() -> None:
    scaler = xamp.GradScaler()
    scaler.process_group = threading.Lock()  # which no pickle takes, like a group
    assert copy.deepcopy(scaler).process_group is None
