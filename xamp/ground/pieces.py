"""Lists of tensors in pieces, so that what is computed on lists has temporaries of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from xamp.ground import kernels

__all__ = ["cut", "groups"]


def groups(lists: Sequence[Sequence[torch.Tensor]], limit: int) -> Iterator[tuple[slice, list[list[torch.Tensor]]]]:
    """Yield lists of tensors, detached, in groups of whole tensors, and which tensors of the lists they are.

    Args:
        lists: as many tensors each, those of one place with as many elements.
        limit: how many elements a group has of each list at most, unless it is a single tensor.
    """
    start, total = 0, 0
    sizes = [tensor.numel() for tensor in lists[0]]
    for place in range(len(sizes) + 1):
        is_full = place == len(sizes) or total + sizes[place] > limit
        if place > start and is_full:
            yield slice(start, place), [[tensor.detach() for tensor in tensors[start:place]] for tensors in lists]
            start, total = place, 0
        total += sizes[place] if place < len(sizes) else 0


def cut(group: Sequence[Sequence[torch.Tensor]], limit: int) -> Iterator[Sequence[Sequence[torch.Tensor]]]:
    """Yield a group in pieces: itself, or the parts of its only tensor, which are views, if that is above ``limit``.

    A tensor of another class, such as a shard, has no parts, and one in a format of its device's own has no views.
    """
    row = [tensors[0] for tensors in group]
    size = row[0].numel()
    if len(group[0]) > 1 or size <= limit or not all(type(t) is torch.Tensor and _is_plain(t) for t in row):
        yield group
        return
    if all(tensor.is_contiguous() for tensor in row):
        row = [tensor.view(-1) for tensor in row]
    longest = max(range(row[0].dim()), key=row[0].size)
    length = max(1, limit * row[0].size(longest) // size)
    for parts in zip(*(tensor.split(length, longest) for tensor in row), strict=True):
        yield [[part] for part in parts]


def _is_plain(tensor: torch.Tensor) -> bool:
    return kernels.plain([tensor])[0] is tensor
