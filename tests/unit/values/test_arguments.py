"""Single arguments: what counts as a number.

Covers: xamp.values.arguments.
"""

from __future__ import annotations

import pytest

from xamp.errors import PolicyError
from xamp.values.arguments import number, number_between


@pytest.mark.parametrize("given", [True, False, float("nan"), "nan", "many", None, [1]], ids=repr)
def test_this_is_no_number(given: object) -> None:
    with pytest.raises(PolicyError, match="must be a number"):
        number("init_scale", given)
    with pytest.raises(PolicyError, match="must be a number"):
        number_between("init_scale", given, 0, 10)


@pytest.mark.parametrize(("given", "found"), [("2", 2), (2.0, 2), ("9e0", 9)], ids=repr)
def test_a_whole_number_may_be_spelt_as_text(given: object, found: int) -> None:
    assert repr(number_between("num_losses", given, 0, 10, whole=True)) == repr(found)


@pytest.mark.parametrize("given", [0, 10, 2.5, -1, float("inf")], ids=repr)
def test_a_number_that_is_out_of_bounds_or_broken_is_refused(given: object) -> None:
    with pytest.raises(PolicyError, match="must be a whole number above 0 and below 10"):
        number_between("num_losses", given, 0, 10, whole=True)
