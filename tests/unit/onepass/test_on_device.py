"""Each rule on the device by its own compiler, against fp64; where none compiles for it, it is said why.

Covers: xamp.onepass.kernels, xamp.plans.available.
"""

from __future__ import annotations

import pytest
import torch
from lanes import Lane
from onepass_cases import CASES
from onepass_on_device import largest_error

from xamp.onepass import Plan, Row, Rule
from xamp.plans import available

BEYOND = 2**31 + 2**20  # elements, 4 bytes of each


def runs_on(lane: Lane) -> bool:
    """Return whether the kernels run there. Where Triton compiles for the device they must: nothing falls back."""
    why = available.refusal(lane.device)
    assert why == "" or not available.expects(lane.device), why
    return why == ""


@pytest.mark.parametrize("name", CASES)
def test_each_rule_is_fp64s_on_the_device(lane: Lane, name: str) -> None:
    if runs_on(lane):
        assert 0.0 < largest_error(name, str(lane.device)) <= 3.0
    else:
        with pytest.raises(ValueError, match="no kernels: "):
            available.plan(CASES[name][0], [Row(torch.zeros(3, device=lane.device))])


def test_a_table_of_more_elements_than_32_bits_count(lane: Lane) -> None:
    """Where the memory is: of fp16 parameters and gradients, the first, the middle and the last are looked at."""
    module = torch.get_device_module(lane.device)
    free = module.mem_get_info(lane.device)[0] if hasattr(module, "mem_get_info") else 0
    size = BEYOND if free > 6 * BEYOND else 2**14
    if not runs_on(lane):
        return
    param, grad = (torch.full((size,), value, dtype=torch.float16, device=lane.device) for value in (1.0, 0.5))
    plan, found = Plan(Rule("sgd"), [Row(param)]), torch.zeros((), device=lane.device)
    plan.check([grad], found)
    plan.step([grad], [{"lr": 1.0}], found)
    assert float(found) == 0.0
    torch.testing.assert_close(plan.checked_norm().cpu(), torch.tensor(0.5 * size**0.5), rtol=1e-6, atol=0.0)
    for place in (0, size // 2, size - 1):
        assert float(param[place]) == 0.5
    grad[size - 1] = torch.inf
    plan.check([grad], found)
    assert float(found) == 1.0
