"""Lists in pieces: every element comes once, parts are views, and what a flag forbids is not written.

Covers: xamp.torch_compat.pieces, xamp.updates.
"""

from __future__ import annotations

import pytest
import torch

from xamp.torch_compat import pieces

SIZES = (3, 0, 5, 40, 1, 7)


def _lists(count: int = 2) -> list[list[torch.Tensor]]:
    return [[torch.arange(size, dtype=torch.float32) + 100 * index for size in SIZES] for index in range(count)]


@pytest.mark.parametrize("limit", [1, 4, 8, 41, 1000])
def test_groups_and_parts_have_every_element_once_and_keep_the_limit(limit: int) -> None:
    lists, seen = _lists(), [0] * len(SIZES)
    for places, group in pieces.groups(lists, limit):
        assert sum(t.numel() for t in group[0]) <= limit or len(group[0]) == 1
        for piece in pieces.cut(group, limit):
            assert all(len(tensors) == len(piece[0]) for tensors in piece)
            assert sum(t.numel() for t in piece[0]) <= limit
            for place, tensor in zip(range(places.start, places.stop), piece[0], strict=False):
                seen[place] += tensor.numel()
            for tensors in piece:
                for tensor in tensors:
                    tensor.neg_()
    assert seen == list(SIZES)
    for old, new in zip(_lists(), lists, strict=True):
        assert all(torch.equal(-a, b) for a, b in zip(old, new, strict=True))


def test_groups_are_as_few_as_their_order_allows() -> None:
    found = [(places.start, places.stop) for places, _ in pieces.groups(_lists(), 9)]
    assert found == [(0, 3), (3, 4), (4, 6)]


def test_no_lists_no_pieces() -> None:
    assert list(pieces.groups([[], []], 5)) == []
    pieces.apply(lambda lists: pytest.fail("nothing is to do"), [[], []], 5)


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 3),
        lambda t: t[:, ::2],
    ],
)
def test_a_tensor_of_any_strides_is_cut_into_views(form: object) -> None:
    tensor: torch.Tensor = form(torch.randn(4, 6, 5, 3))  # type: ignore[operator]
    other = torch.randn(tensor.shape)
    expected = tensor * 2 + other
    found = list(pieces.cut([[tensor], [other]], 50))
    assert len(found) > 1
    for [[mine], [its]] in found:
        mine.mul_(2).add_(its)
    assert torch.equal(tensor, expected)


def test_a_shard_stays_whole() -> None:
    class Shard(torch.Tensor):
        pass

    shard = torch.ones(10).as_subclass(Shard)
    assert [len(piece[0]) for piece in pieces.cut([[shard]], 2)] == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("obeys", [False, True])
@pytest.mark.parametrize("raised", [None, 0, 1])
def test_a_rule_writes_states_and_copies_unless_the_flag_is_raised(
    raised: int | None, obeys: bool, dtype: torch.dtype
) -> None:
    grads, states, copies = ([torch.full((size,), value, dtype=dtype) for size in SIZES] for value in (0.5, 1.0, 7.0))
    skip = None if raised is None else torch.tensor([raised], dtype=torch.int32)

    def rule(lists: pieces.Lists) -> None:
        for grad, state in zip(*lists, strict=True):
            assert grad.dtype == state.dtype == torch.float32
            state.add_(grad, alpha=0.0 if obeys and raised else 2.0)

    pieces.apply(rule, [grads, states], 16, [copies], skip, obeys)
    for grad, state, copy in zip(grads, states, copies, strict=True):
        assert bool((grad == 0.5).all())
        assert bool((state == (1.0 if raised else 2.0)).all())
        assert bool((copy == (7.0 if raised else 2.0)).all())
