"""How far the kernels of :mod:`xamp.onepass` are from fp64 on a device: python onepass_on_device.py cuda.

The errors are in units of fp32's last place of the sum of the magnitudes of a result's terms: where terms cancel
nothing that computes in fp32 is nearer, for the terms themselves are rounded. The reference is computed on the host.
"""

from __future__ import annotations

import sys
from typing import Any

import onepass_fp64
import torch
from onepass_cases import CASES, LOWER, SHAPES, rows_of

from xamp.onepass import Plan, Row
from xamp.plans import available

EPS = torch.finfo(torch.float32).eps


def largest_error(name: str, device: str = "cpu") -> float:
    """Take five steps of a case and return the largest error of each, which must be checked, scaled and counted right.

    Raises:
        AssertionError: a lower weight is not the rounded master, a count is wrong, an inf is not found or changes bits.
    """
    rule, group = CASES[name]
    torch.manual_seed(len(name))
    rows = [_moved(row, device) for row in rows_of(rule, group, SHAPES)]
    plan = Plan(rule, rows, block=64)
    found, inverse, clip = (torch.tensor(value, device=device) for value in (0.0, 1 / 512, 0.75))
    worst = 0.0
    for count in range(1, 6):
        grads = [
            torch.randn(row.param.shape).mul(512.0).to(LOWER[i % 3] or torch.float32) for i, row in enumerate(rows)
        ]
        wanted = [
            wanted_of(rule, row, grad.double() / 512 * 0.75, group, count)
            for row, grad in zip(rows, grads, strict=True)
        ]
        given = [grad.to(device) for grad in grads]
        plan.check(given, found, [group])
        plan.step(given, [group], found, inverse, clip)
        for row, expected in zip(rows, wanted, strict=True):
            worst = max(worst, error_of(row, *expected))
            assert row.low is None or torch.equal(row.low, row.param.to(row.low.dtype)), "a lower weight is wrong"
            assert row.step is not None, "rows of a case have counts"
            assert float(row.step) == count, "a count is wrong"
    _skip(plan, group, found)
    return worst


def _skip(plan: Plan, group: dict[str, Any], found: torch.Tensor) -> None:
    rows = plan.rows
    held = [t for row in rows for t in (row.param, row.low, *row.states, row.step) if t is not None]
    before, grads = [t.clone() for t in held], [torch.ones_like(row.param) for row in rows]
    grads[0].view(-1)[-1] = torch.inf
    plan.check(grads, found, [group])
    plan.step(grads, [group], found)
    assert bool(found), "an inf is not found"
    assert all(map(torch.equal, held, before)), "a skipped step changes bits"


def _moved(row: Row, device: str) -> Row:
    param, low, step = (None if t is None else t.to(device) for t in (row.param, row.low, row.step))
    assert param is not None
    return Row(param, low, tuple(state.to(device) for state in row.states), step)


def error_of(row: Row, right: list[torch.Tensor], sizes: list[torch.Tensor]) -> float:
    """Return the largest error of a row's parameter and states, in the units of this module."""
    held = [(one.cpu().double(), *more) for one, *more in zip([row.param, *row.states], right, sizes, strict=False)]
    errors = [((one - other).abs() / (EPS * size)).nan_to_num(0.0) for one, other, size in held if one.numel()]
    return max((float(error.max()) for error in errors), default=0.0)


def wanted_of(rule: Any, row: Row, wide: torch.Tensor, group: dict[str, Any], count: int) -> tuple[Any, Any]:
    """Return the results of a step by an unscaled gradient, and the sums of their terms' magnitudes, all fp64."""
    param, *states = (t.cpu() for t in (row.param, *row.states))
    wide = wide.double()
    right = onepass_fp64.stepped(rule, param, states, wide, group, count)
    added = {**group, "lr": -group["lr"], "maximize": False}  # so all terms have one sign
    sizes = onepass_fp64.stepped(rule, param.abs(), [state.abs() for state in states], wide.abs(), added, count)
    return right, sizes


def main(device: str) -> int:
    """Print a line for each case; return 1 where one is wrong."""
    print(f"one pass on {device}: {available.described(torch.device(device))}")
    wrong = 0
    for name in CASES:
        try:
            said = f"{largest_error(name, device):.2f} units of the last place"
        except Exception as error:
            wrong, said = 1, f"wrong: {' '.join(repr(error).split())[:300]}"
        print(f"{name:<28} {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
