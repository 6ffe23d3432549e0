"""The pass that looks for what is not finite and takes norms; rounding of bf16; launches; tables that are late.

Covers: xamp.onepass.sums, xamp.onepass.plan, xamp.onepass.ring.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from xamp.onepass import Plan, PointerRing, Row, Rule, ring
from xamp.plans import available

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plan_over(grads: list[torch.Tensor], block: int = 16) -> Plan:
    return Plan(Rule("sgd"), [Row(torch.zeros(grad.shape)) for grad in grads], block=block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_at_each_place(dtype: torch.dtype, value: float) -> None:
    """Of a tensor within a block, and of one with a block in the middle, whose last is not full."""
    grads = [torch.full((3,), 2.0, dtype=dtype), torch.zeros(10, dtype=dtype)]
    plan, found = plan_over(grads, 4), torch.zeros(())
    plan.check(grads, found)
    assert float(found) == 0.0
    for place in range(13):
        spoilt = [grad.clone() for grad in grads]
        (spoilt[0] if place < 3 else spoilt[1])[place if place < 3 else place - 3] = value
        plan.check(spoilt, found.zero_())
        assert float(found) == 1.0, place


def test_a_raised_flag_stays_raised() -> None:
    grads = [torch.ones(5)]
    found = torch.ones(1)
    plan_over(grads).check(grads, found)
    assert float(found) == 1.0


@pytest.mark.parametrize("size", [1.0, 1e-30, 3e38, 60000.0])
def test_the_norm_is_fp64s(size: float) -> None:
    torch.manual_seed(1)
    dtype = torch.float16 if size == 60000.0 else torch.float32
    grads = [torch.rand(70).mul(size).to(dtype), torch.rand(3, 3).mul(size).to(dtype)]
    plan, inverse = plan_over(grads), torch.tensor(2.0**-20)
    plan.check(grads, torch.zeros(()))
    right = torch.cat([grad.double().flatten() for grad in grads]).norm() * 2.0**-20
    error = 1e-7
    torch.testing.assert_close(plan.checked_norm(inverse), right.float(), rtol=error, atol=0.0)
    for kind in (1.0, 2.0, 3.0, math.inf):
        flat = torch.cat([grad.double().flatten() for grad in grads])
        right = torch.linalg.vector_norm(flat, kind) * 2.0**-20 if size < 1e30 or kind != 3.0 else None
        if right is not None:
            torch.testing.assert_close(plan.norm(grads, inverse, kind), right.float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
def test_a_norm_of_nan_is_nan(kind: float) -> None:
    grads = [torch.ones(40)]
    grads[0][35] = math.nan
    assert bool(plan_over(grads).norm(grads, None, kind).isnan())


def test_a_norm_of_another_kind_keeps_the_sums_of_the_check() -> None:
    grads = [torch.arange(20.0)]
    plan = plan_over(grads)
    plan.check(grads, torch.zeros(()))
    plan.norm(grads, None, math.inf)
    torch.testing.assert_close(plan.checked_norm(), grads[0].norm())


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (4.0, 0.25), (math.inf, 0.0), (math.nan, math.nan)])
def test_the_factor_of_clipping_is_torchs(norm: float, factor: float) -> None:
    found = plan_over(grads := [torch.zeros(1)]).clip_factor(grads, torch.tensor(norm), 1.0)
    torch.testing.assert_close(found, torch.tensor(factor), equal_nan=True, rtol=1e-5, atol=0.0)


def test_gradients_that_others_read_are_unscaled_and_clipped_in_place() -> None:
    """Those of the last rows are, to the bit of torch's own product; norms and the step take each as it is."""
    torch.manual_seed(2)
    kept, direct = torch.randn(20).half(), [torch.randn(19), torch.randn(3, 5), torch.zeros(0)]
    before = [grad.clone() for grad in direct]
    params = [torch.randn(grad.shape) for grad in (kept, *direct)]
    plan = Plan(Rule("sgd"), [Row(p, in_place=number > 0) for number, p in enumerate(params)], block=8)
    grads, inverse, found = [kept, *direct], torch.tensor(2.0**-3), torch.zeros(())
    plan.check(grads, found, None, inverse)
    assert all(torch.equal(now, old * inverse) for now, old in zip(direct, before, strict=True))
    flat = torch.cat([kept.double() / 8, *(grad.double().flatten() for grad in direct)])
    torch.testing.assert_close(plan.checked_norm(inverse), flat.norm().float())
    unclipped = [grad.clone() for grad in direct]
    clip = plan.clip_factor(grads, plan.checked_norm(inverse), 0.5)
    assert float(clip) == pytest.approx(0.5 / (float(flat.norm()) + 1e-6))
    assert all(torch.equal(now, old * clip) for now, old in zip(direct, unclipped, strict=True))
    for kind in (1.0, 2.0, 3.0, math.inf):
        right = torch.linalg.vector_norm(flat * clip.double(), kind).float()
        torch.testing.assert_close(plan.norm(grads, inverse, kind, clip), right)
    wanted = [p.double() - 0.5 * g.double() for p, g in zip(params[1:], direct, strict=True)]
    wanted.insert(0, params[0].double() - 0.5 * kept.double() / 8 * clip.double())
    plan.step(grads, [{"lr": 0.5}], found, inverse, clip)
    assert kept.dtype == torch.float16
    rtol, atol = 2.0**-23, 0.0
    for now, right in zip(params, wanted, strict=True):
        torch.testing.assert_close(now, right.float(), rtol=rtol, atol=atol)


def test_an_inf_of_a_gradient_that_others_read_is_found() -> None:
    grads = [torch.ones(3), torch.tensor([1.0, math.inf, 2.0])]
    plan = Plan(Rule("sgd"), [Row(torch.zeros(3)), Row(torch.zeros(3), in_place=True)])
    plan.check(grads, found := torch.zeros(()), None, torch.tensor(0.5))
    assert float(found) == 1.0
    assert grads[1].tolist() == [0.5, math.inf, 1.0]
    assert math.isinf(float(plan.checked_norm()))


def test_rows_whose_gradients_change_in_place_come_last() -> None:
    rows = [Row(torch.zeros(3), in_place=True), Row(torch.zeros(3))]
    with pytest.raises(ValueError, match="come last"):
        Plan(Rule("sgd"), rows)


def test_a_plan_has_rows() -> None:
    with pytest.raises(ValueError, match="no rows"):
        Plan(Rule("sgd"), [])


def test_an_eps_that_a_group_lacks_is_torchs() -> None:
    row = Row(torch.ones(3), None, (torch.zeros(3), torch.zeros(3)), torch.zeros(()))
    Plan(Rule("adam"), [row]).step([torch.full((3,), 1e-8)], [{"lr": 0.5}])
    torch.testing.assert_close(row.param, torch.full((3,), 0.75), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_zeros_is_zero(kind: float) -> None:
    grads = [torch.zeros(3), torch.zeros(2, 2)]
    plan = plan_over(grads)
    plan.check([None, None], torch.zeros(()))
    assert float(plan.checked_norm()) == 0.0
    assert float(plan.norm(grads, None, kind)) == 0.0


def test_bf16_is_rounded_as_torch_rounds_it() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    near = torch.cat([patterns + step for step in (0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1)])
    values = near.view(torch.float32)
    values = values[~values.isinf()]  # a weight that is inf has no step: 0 * inf is nan
    low = torch.zeros(values.shape, dtype=torch.bfloat16)
    Plan(Rule("sgd"), [Row(values.clone(), low)], block=2**15).step([torch.zeros(values.shape)], [{"lr": 0.0}])
    right = values.to(torch.bfloat16)
    assert torch.equal(low.isnan(), right.isnan())
    assert torch.equal(low.view(torch.int16)[~low.isnan()], right.view(torch.int16)[~low.isnan()])


def test_bf16_is_widened_exactly() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    param = torch.zeros(2**16)
    Plan(Rule("sgd"), [Row(param)], block=2**14).step([patterns], [{"lr": -1.0}])
    torch.testing.assert_close(param, patterns.float(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_launches_depend_on_dtypes_alone(kinds: int, count: int) -> None:
    """At most 4, with clipping 6, and two more for each further combination; whatever the rows and groups are."""
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [{**group, "weight_decay": decay} for decay in (0.0, 0.1, 0.2)]
    rows = [
        Row(
            torch.zeros(5),
            torch.zeros(5, dtype=DTYPES[1 + i % kinds % 2]),
            (torch.zeros(5), torch.zeros(5)),
            torch.zeros(()),
            i % 3,
        )
        for i in range(count)
    ]
    plan, found, inverse = Plan(Rule("adam"), rows), torch.zeros(()), torch.ones(())
    further = 2 * (min(kinds, count) - 1)
    for _ in range(2):
        grads = [torch.ones(5, dtype=DTYPES[i % kinds]) for i in range(count)]  # elsewhere in memory each time
        plan.check(grads, found, groups[: min(count, 3)])
        plan.step(grads, groups, found, inverse)
        assert 3 + further <= plan.launches <= 4 + further
        plan.check(grads, found, groups)
        plan.step(grads, groups, found, inverse, plan.clip_factor(grads, plan.checked_norm(inverse), 1.0))
        assert 5 + further <= plan.launches <= 6 + further


def test_parts_by_the_dtypes_of_gradients() -> None:
    """Each launch takes the blocks of one combination; those without a gradient stay where they were."""
    rows = [Row(torch.zeros(9)), Row(torch.zeros(3)), Row(torch.zeros(0)), Row(torch.zeros(5), in_place=True)]
    plan = Plan(Rule("sgd"), rows, block=4)
    whole, half = torch.float32, torch.float16

    def shown(grads: list[Any]) -> list[list[tuple[int, int]]]:
        plan.check(grads, torch.zeros(()))
        return [[(entry >> 32, entry & 0xFFFFFFFF) for entry in part.entries.tolist()] for part in plan._parts.steps]

    first, second, last = [(0, 0), (0, 1), (0, 2)], [(1, 0)], [(3, 0), (3, 1)]
    assert shown([None, None, None, None]) == [[*first, *second, *last]]
    grads: list[Any] = [torch.ones(row.param.shape, dtype=half if n == 1 else whole) for n, row in enumerate(rows)]
    assert shown(grads) == [[*first, *last], second]
    assert shown([grads[0], None, None, grads[3]]) == [[*first, *last], second]
    assert [part.constants["IN_PLACE"] for part in plan._parts.sums] == [False, False, True]
    assert len(plan._all_parts) == 2


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_blocks_that_are_full_and_aligned_or_not(shift: int) -> None:
    """The parameter or the gradient lies beside a border of 16 bytes: the same sums and steps, to the bit."""
    values, grad = torch.randn(32), torch.randn(32)
    for moved in range(2):
        room = torch.zeros(2, 48)
        param, given = (row[shift * (n == moved) :][:32] for n, row in enumerate(room))
        param.copy_(values)
        given.copy_(grad)
        plan, found = Plan(Rule("sgd"), [Row(param)], block=8), torch.zeros(())
        plan.check([given], found)
        plan.step([given], [{"lr": 1.0}])
        assert torch.equal(param, values - grad)
        torch.testing.assert_close(plan.checked_norm(), grad.norm())
        assert room.count_nonzero() == 64, "nothing beside them is written"


def test_a_tensor_that_moved_is_noticed() -> None:
    param = torch.zeros(4)
    plan = Plan(Rule("sgd"), [Row(param)])
    assert not plan.moved()
    param.set_(torch.zeros(4))  # type: ignore[call-overload]
    assert plan.moved()


class LateQueue:
    """A device that is late: copies run when somebody waits for an event behind them."""

    def __init__(self) -> None:
        self.work: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arrived: list[list[int]] = []
        self.done = 0

    def copy(self, there: torch.Tensor, host: torch.Tensor) -> None:
        self.work.append((there, host))

    def run(self, until: int) -> None:
        while self.done < until:
            there, host = self.work[self.done]
            there.copy_(host)
            self.arrived.append(there.tolist())
            self.done += 1

    def current_stream(self, device: object) -> LateQueue:
        return self

    def synchronize(self, device: object) -> None:
        self.run(len(self.work))

    def Event(self) -> Any:  # the name in torch
        queue = self

        class Event:
            def record(self, stream: object) -> None:
                self.behind = len(queue.work)

            def query(self) -> bool:
                return queue.done >= self.behind

            def synchronize(self) -> None:
                queue.run(self.behind)

        return Event()


class LateRing(PointerRing):
    """A ring on such a device, with tables of two words."""

    def __init__(self) -> None:
        self.late = LateQueue()
        super().__init__(2, torch.device("cpu"), self.late)

    def _write(self, host: torch.Tensor, there: torch.Tensor, words: list[int]) -> None:
        super()._write(host, host, words)
        self.late.copy(there, host)


def test_no_table_is_written_again_before_it_was_copied() -> None:
    tables = LateRing()
    for number in range(20):
        tables.send([number, -number])
    assert tables.late.done == 20 - ring._FEW, "it has waited for the oldest"
    tables.late.run(20)
    assert [words[:2] for words in tables.late.arrived] == [[number, -number] for number in range(20)]
    assert len({host.data_ptr() for _, host in tables.late.work}) == ring._FEW


def test_a_table_whose_copy_was_interrupted_is_not_written_again_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when the copy is in the queue and no event is behind it yet."""
    tables = LateRing()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables, "note_launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tables.send([1, -1])
    for number in range(2, 8):
        tables.send([number, -number])
    tables.late.run(7)
    assert [words[:2] for words in tables.late.arrived] == [[number, -number] for number in range(1, 8)]


def test_the_reason_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available.refusal("cpu") == ""
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "Triton has no kernels for a CPU" in available.refusal("cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert available.refusal("cpu") == "Triton is not installed"


def test_a_table_is_free_when_the_last_kernel_that_reads_it_is_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Told(PointerRing):
        def note_launch(self) -> None:
            order.append("used")

    launch = Plan._run

    def run(self: Plan, name: str, *args: Any, **constants: Any) -> None:
        order.append(name)
        launch(self, name, *args, **constants)

    monkeypatch.setattr(Plan, "_run", run)
    grad, found, state = torch.ones(4), torch.zeros(()), torch.zeros(4)
    plan = Plan(Rule("sgd"), [Row(torch.zeros(4), None, (state,), torch.ones(()))], tables=Told)
    hyper = [{"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}]
    for call in (
        lambda: plan.check([grad], found),
        lambda: plan.clip_factor([grad], torch.ones(()), 1.0),
        lambda: plan.step([grad], hyper, found),
    ):
        order.clear()
        call()
        assert order[-1] == "used"
        assert len(order) > 1


@pytest.mark.parametrize(
    ("grad", "fits"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).half(), True),
        (None, True),
        (torch.ones(3, 3), False),
        (torch.ones(3, 2).t(), False),
        (torch.ones(2, 3).double(), False),
        (torch.ones(2, 3, device="meta"), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.ones(2, 3, dtype=torch.complex64).conj().imag, False),
    ],
)
def test_gradients_that_suit_a_plan(grad: torch.Tensor | None, fits: bool) -> None:
    plan = Plan(Rule("sgd"), [Row(torch.zeros(4)), Row(torch.zeros(2, 3))])
    assert plan.suits([torch.ones(4), grad]) is fits


def test_the_order_of_a_parameters_gradient_is_looked_at() -> None:
    plan = Plan(Rule("sgd"), [Row(torch.zeros(2, 3)), Row(torch.zeros(1, 4))])
    for grads, fits in (
        ([torch.ones(2, 3), torch.ones(1, 4)], True),
        ([torch.ones(2, 3), torch.ones(4, 1).t()], True),  # a dimension of one element has no order
        ([torch.ones(3, 2).t(), torch.ones(1, 4)], False),
        ([torch.ones(2, 3, dtype=torch.float64), torch.ones(1, 4)], False),
        ([torch.ones(2, 3), None], True),
    ):
        assert plan.suits(grads, of_params=True) is fits
