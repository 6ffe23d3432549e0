"""Tier probe: the device does what its backend declares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import xamp
from xamp.doctor.declared import find_mismatches
from xamp.errors import UnsupportedPolicy
from xamp.policy import best_level, levels_where
from xamp.registry import registry
from xamp.testing.exact import Dot, assert_same, picture, sgd, start
from xamp.testing.lane import Lane
from xamp.testing.ledger import read_ledger
from xamp.testing.tier import Tier, clause_of, every_level

__all__ = ["Probe"]

DTYPES = ("float32", "float16", "bfloat16")
EPS = {"float32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Bound on the relative error of a product of two numbers: for fp32 that of TF32, else a unit in the last place."""


class Probe(Tier):
    """The device does what its backend declares."""

    tier = "probe"

    def test_device_string(self, lane: Lane) -> None:
        """Every tensor of a session is on the model's device, whatever the backend is called."""
        assert lane.kind in lane.backend.spec.device_types
        with_masters = levels_where(lambda row: row.master_weights)
        level = next((level for level in with_masters if lane.declares(level)), best_level(()).name)
        pair = start(lane, level)
        session = xamp.session(pair.model)
        assert session.device.type == lane.kind
        assert session.backend.name == lane.backend.name
        tensors = [*pair.model.parameters(), *xamp.master_params(pair.optimizer)]
        assert {tensor.device.type for tensor in tensors} == {lane.kind}
        with xamp.scale_loss(pair.model(torch.ones(7, device=lane.device)), pair.optimizer) as scaled:
            assert scaled.device == pair.model.first.weight.device
            scaled.backward()
        grads = [p.grad for p in xamp.master_params(pair.optimizer)]
        assert {grad.device for grad in grads if grad is not None} == {pair.model.first.weight.device}

    def test_report(self, lane: Lane) -> None:
        """``available_backends`` reports the backend as usable, with its devices and capabilities."""
        (report,) = [each for each in xamp.available_backends() if each.name == str(lane)]
        assert report.usable, report.reason
        assert report.devices
        assert all(name for name in report.devices)
        assert "torch" in report.versions
        assert report.capabilities is not None

    def test_declarations(self, lane: Lane) -> None:
        """All that the backend declares holds when ``xamp doctor`` tries it."""
        assert [finding.text for finding in find_mismatches(lane.backend, lane.device)] == []

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_product(self, lane: Lane, dtype: str) -> None:
        """A matrix product is right to about a unit in the last place of its dtype; in fp32 at least of TF32."""
        if dtype != "float32":
            lane.need(dtype)
        a, b = (torch.rand(64, 64, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in (1, 2))
        for left in (a, torch.diag(a[0])):  # in sums errors cancel; in single products they show
            lowered = [each.to(lane.device, getattr(torch, dtype)) for each in (left, b)]
            exact = lowered[0].cpu().double() @ lowered[1].cpu().double()
            error = ((lowered[0] @ lowered[1]).cpu().double() - exact).abs() / exact
            assert error.max() <= EPS[dtype]

    @pytest.mark.parametrize("dtype", DTYPES[1:])
    def test_inf_stays(self, lane: Lane, dtype: str) -> None:
        """If the backend declares that an overflow shows as inf, an overflowing product is inf, and 0 / 0 is nan."""
        lane.need(dtype)
        if lane.can.overflow != "inf":
            lane.lacks("that an overflow shows as inf")
        largest = torch.full((8,), torch.finfo(getattr(torch, dtype)).max, device=lane.device).to(getattr(torch, dtype))
        assert (largest * 4).isposinf().all()
        assert (largest * -4).isneginf().all()
        zero = torch.zeros(8, dtype=largest.dtype, device=lane.device)
        assert (zero / zero).isnan().all()

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_overflow_is_found(self, lane: Lane, size: int) -> None:
        """``unscale_`` finds an overflow in any gradient, and reports none in later calls without an overflow."""
        for spoilt in (0, None, 2, None):
            found, inverse = torch.zeros((), device=lane.device), torch.full((), 0.5, device=lane.device)
            lane.backend.clear_overflow(lane.device)
            grads = [torch.ones(size, device=lane.device) for _ in range(3)]
            if spoilt is not None:
                lane.overflow_(grads[spoilt])
            lane.backend.unscale_(grads, found, inverse)
            assert found.item() == (0.0 if spoilt is None else 1.0), f"overflow in {spoilt}"

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
    def test_one_value_is_enough(self, lane: Lane, value: float) -> None:
        """``unscale_`` finds one inf or nan among many values, in any dtype and at any place."""
        if lane.can.overflow != "inf":
            lane.lacks("that an overflow shows as inf")
        for dtype in ("float32", *lane.can.dtypes):
            for index in (0, 500, 999):
                grad = torch.ones(1000, device=lane.device, dtype=getattr(torch, dtype))
                grad[index] = value
                found, inverse = torch.zeros((), device=lane.device), torch.ones((), device=lane.device)
                lane.backend.unscale_([torch.ones(3, device=lane.device), grad], found, inverse)
                assert found.item() == 1.0, f"{value} at {index} in {dtype}"

    @pytest.mark.parametrize("inverse", [0.5, 2.0**-16, 1 / 3, 1.0])
    def test_unscale_multiplies(self, lane: Lane, inverse: float) -> None:
        """``unscale_`` multiplies gradients of any shape, memory layout and dtype by the inverse, in place."""
        shapes = [(), (1,), (5,), (3, 4), (2, 3, 4, 5), (0,)]
        for dtype in ("float32", *lane.can.dtypes):
            grads = [torch.rand(shape).add(1).to(lane.device, getattr(torch, dtype)) for shape in shapes]
            grads.append(torch.rand(6, 4).to(lane.device, getattr(torch, dtype)).t())
            wanted = [grad.cpu().float() * inverse for grad in grads]
            places = [grad.data_ptr() for grad in grads]
            lane.backend.clear_overflow(lane.device)
            found = torch.zeros((), device=lane.device)
            lane.backend.unscale_(grads, found, torch.full((), inverse, device=lane.device))
            assert found.item() == 0.0
            assert [grad.data_ptr() for grad in grads] == places
            for grad, exact in zip(grads, wanted, strict=True):
                torch.testing.assert_close(grad.cpu(), exact.to(grad.dtype), rtol=EPS[dtype], atol=0)

    def test_flag_is_only_raised(self, lane: Lane) -> None:
        """``unscale_`` never writes 0.0 into ``found_inf``, and accepts an empty list."""
        up, one = torch.ones((), device=lane.device), torch.ones((), device=lane.device)
        lane.backend.clear_overflow(lane.device)
        lane.backend.unscale_([torch.ones(4, device=lane.device)], up, one)
        assert up.item() == 1.0
        down = torch.zeros((), device=lane.device)
        lane.backend.unscale_([], down, one)
        assert down.item() == 0.0

    def test_flag_is_asked_alone(self, lane: Lane) -> None:
        """On a chip with a flag ``unscale_`` can read it repeatedly until it is cleared, also without gradients."""
        if lane.can.overflow != "flag":
            lane.lacks("a flag that tells of an overflow")
        lane.backend.clear_overflow(lane.device)
        lane.overflow_(torch.ones(4, device=lane.device))
        one = torch.ones((), device=lane.device)
        for grads in ([], [torch.ones(4, device=lane.device)], []):
            found = torch.zeros((), device=lane.device)
            lane.backend.unscale_(grads, found, one)
            assert found.item() == 1.0
        lane.backend.clear_overflow(lane.device)
        found = torch.zeros((), device=lane.device)
        lane.backend.unscale_([], found, one)
        assert found.item() == 0.0

    @every_level
    def test_undeclared_level_is_refused(self, lane: Lane, level: str) -> None:
        """A level that the backend does not declare is an error that names those it does; nothing changes."""
        model = Dot().to(lane.device)
        optimizer = sgd(model.parameters())
        before = picture(model, optimizer)
        if lane.declares(level):
            xamp.initialize(model, optimizer, level=level, verbosity=0)
            assert xamp.session(model).policy.level == level
            return
        with pytest.raises(UnsupportedPolicy, match=lane.can.levels[0]):
            xamp.initialize(model, optimizer, level=level, verbosity=0)
        assert_same(picture(model, optimizer), before)

    def test_auto_is_declared(self, lane: Lane) -> None:
        """``auto`` takes O4 if bf16 is fast, else O1 if fp16 is fast, else O0."""
        model = Dot().to(lane.device)
        xamp.initialize(model, verbosity=0)
        fast = lane.can.fast_dtypes
        wanted = "bfloat16" if "bfloat16" in fast else "float16" if "float16" in fast else "float32"
        policy = xamp.session(model).policy
        assert (policy.dtype, policy.casts_parameters) == (getattr(torch, wanted), False)

    def test_runtime(self, lane: Lane) -> None:
        """``xamp.accel`` reaches the device: it can count devices and wait for them."""
        runtime: Any = lane.backend.runtime(lane.kind)
        count = runtime.device_count() if hasattr(runtime, "device_count") else 1
        assert count >= 1
        assert len(list(lane.backend.devices())) == count
        if hasattr(runtime, "synchronize"):
            runtime.synchronize()

    def test_seed(self, lane: Lane) -> None:
        """The same seed gives the same numbers on the device; another seed gives others."""
        draws = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            draws.append(torch.rand(100, device=lane.device).cpu())
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    def test_probing_draws_no_numbers(self, lane: Lane) -> None:
        """A fresh probe leaves the random generators as they are, so a seeded run does not change."""
        torch.manual_seed(5)
        expected = torch.rand(4), torch.rand(4, device=lane.device).cpu()
        torch.manual_seed(5)
        fresh = type(lane.backend)(lane.backend.spec)
        fresh.probe()
        fresh.capabilities(lane.device)
        assert torch.equal(torch.rand(4), expected[0])
        assert torch.equal(torch.rand(4, device=lane.device).cpu(), expected[1])

    def test_ledger(self, lane: Lane, request: pytest.FixtureRequest) -> None:
        """Each entry of the ledger names an existing clause."""
        owner = request.node.getparent(pytest.Class)
        assert owner is not None
        clauses = [clause_of(item) for item in owner.collect()]
        unknown = read_ledger(self.ledger or lane.backend.spec.ledger).unknown(clauses)
        assert [entry.clause for entry in unknown] == []

    def test_registered(self, lane: Lane) -> None:
        """The registry finds the backend by its name, and lists it for its device type."""
        assert registry.resolve(str(lane), lane.kind) is lane.backend
        serving = [spec for spec in registry.REGISTRY.specs() if lane.kind in spec.device_types]
        assert lane.backend.spec in serving
