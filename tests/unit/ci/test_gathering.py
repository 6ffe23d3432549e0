"""A test of many cases says all that is wrong."""

from __future__ import annotations

import pytest
from gathering import cases


def some_fail() -> None:
    with cases() as case:
        for number in range(6):
            with case(f"case {number}"):
                assert number % 2 == 0
                if number == 4:
                    raise ValueError("four")
                with pytest.raises(ValueError, match="six"):
                    raise ValueError("six" if number < 2 else "two")


def test_every_case_that_fails_is_told() -> None:
    with pytest.raises(pytest.fail.Exception) as told:
        some_fail()
    lines = [line for line in str(told.value).splitlines() if line.startswith("case")]
    assert str(told.value).startswith("5 wrong:\n")
    assert [line.split(":")[0] for line in lines] == [f"case {number}" for number in (1, 2, 3, 4, 5)]
    assert "case 4: ValueError: four" in lines


def test_where_all_is_right_nothing_is_told() -> None:
    with cases() as case, case("one"):
        assert True


def test_what_is_no_case_ends_the_test() -> None:
    with pytest.raises(KeyError), cases():
        raise KeyError("outside")
