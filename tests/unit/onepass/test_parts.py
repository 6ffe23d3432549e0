"""The tables of a plan: the words of rows, and which blocks one launch takes.

Covers: xamp.onepass.parts, xamp.onepass.elements.
"""

from __future__ import annotations

import pytest
import torch

from xamp.onepass import Plan, Row, Rule
from xamp.onepass.elements import BLOCKS, FIRST_BLOCK, FIRST_SUM, GROUP, IN_PLACE, ROW, SIZE, STEP, SUMS, WHOLE
from xamp.onepass.parts import cut, row_words


def rows_of(words: list[int]) -> list[list[int]]:
    return [words[at : at + ROW.value] for at in range(0, len(words), ROW.value)]


def test_the_words_of_rows() -> None:
    first, second = torch.zeros(9), torch.zeros(4, 5)
    count, low = torch.zeros(()), torch.zeros(9).half()
    rows = [Row(first, low, (torch.zeros(9), torch.zeros(9)), count, 2), Row(second, in_place=True)]
    words, blocks, sums = row_words("adam", rows, 4, 16)
    one, other = rows_of(words)
    assert (blocks, sums) == (3 + 5, 1 + 2)
    assert one[:6] == [t.data_ptr() for t in (first, low, *rows[0].states)] + [0, count.data_ptr()]
    assert other[:6] == [second.data_ptr(), 0, 0, 0, 0, 0]
    for word, wanted in (
        (SIZE, (9, 20)), (GROUP, (2, 0)), (IN_PLACE, (0, 1)), (FIRST_BLOCK, (0, 3)), (BLOCKS, (3, 5)),
        (FIRST_SUM, (0, 1)), (SUMS, (1, 2)), (WHOLE, (9, 20)), (STEP, (count.data_ptr(), 0)),
    ):  # fmt: skip
        assert (one[word.value], other[word.value]) == wanted


@pytest.mark.parametrize("place", ["param", "low", "state", "none"])
def test_a_row_is_whole_where_all_that_is_read_is_aligned(place: str) -> None:
    def at(name: str) -> torch.Tensor:
        return torch.zeros(12)[4 * (name != place) + (name == place) :][:8]

    low = torch.zeros(24, dtype=torch.float16)[1 if place == "low" else 8 :][:8]
    words, _, _ = row_words("adam", [Row(at("param"), low, (at("state"), torch.zeros(8)))], 4, 16)
    assert words[WHOLE.value] == (8 if place == "none" else 0)


def test_the_norm_of_novograd_is_read_by_itself() -> None:
    norm = torch.zeros(4)[1]
    words, _, _ = row_words("novograd", [Row(torch.zeros(8), None, (torch.zeros(8), norm))], 4, 16)
    assert words[WHOLE.value] == 8
    (part,) = cut("novograd", [Row(torch.zeros(8), None, (torch.zeros(8), norm))], [torch.float32], 4, 16).steps
    assert part.constants["STATES"] == 1


def test_parts_have_the_dtypes_of_their_rows() -> None:
    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    rows = [
        Row(torch.zeros(5), torch.zeros(5, dtype=half), (torch.zeros(5), torch.zeros(5))),
        Row(torch.zeros(5, dtype=half), None, (torch.zeros(5, dtype=brain),)),
        Row(torch.zeros(3), in_place=True),
    ]
    parts = cut("adam", rows, [half, half, full], 4, 16)
    assert [part.constants for part in parts.steps] == [
        {"PARAMS": 1, "LOWS": 2, "STATE_CODE": 1, "STATES": 2, "GRADS": 2},
        {"PARAMS": 2, "LOWS": 0, "STATE_CODE": 3, "STATES": 1, "GRADS": 2},
        {"PARAMS": 1, "LOWS": 0, "STATE_CODE": 1, "STATES": 0, "GRADS": 1},
    ]
    assert [part.constants for part in parts.sums] == [{"GRADS": 2, "IN_PLACE": False}, {"GRADS": 1, "IN_PLACE": True}]
    assert [part.entries.tolist() for part in parts.steps] == [[0, 1], [2**32, 2**32 + 1], [2**33]]
    assert [part.entries.tolist() for part in parts.sums] == [[0, 2**32], [2**33]]


def test_rows_without_elements_are_in_no_part() -> None:
    """And count their steps."""
    row = Row(torch.zeros(0, 3), None, (), torch.zeros(()))
    plan, found = Plan(Rule("sgd"), [row]), torch.zeros(())
    plan.check([torch.zeros(0, 3)], found)
    plan.step([torch.zeros(0, 3)], [{"lr": 1.0}], found)
    assert plan._parts == ([], [])
    assert float(row.step or 0) == 1.0
    plan.step([None], [{"lr": 1.0}], found)
    assert row.step is not None
    assert float(row.step) == 1.0
