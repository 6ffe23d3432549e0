"""Lists of tensors in pieces and in fp32, so that arithmetic on lists makes temporaries of a bounded size.

A rule for lists is applied to one piece after the other. What it writes to must be detached: then a write into a view
is one into the tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch

from xamp.torch_compat import kernels

__all__ = ["Lists", "Piece", "apply", "cut", "floats", "groups", "opened", "store"]

Lists = Sequence[Sequence[torch.Tensor]]
Piece = list[list[torch.Tensor]]

_LOWER = (torch.float16, torch.bfloat16)


def groups(lists: Lists, limit: int) -> Iterator[tuple[slice, Piece]]:
    """Yield the lists, detached, in groups of whole tensors, and which tensors of the lists they are.

    Args:
        lists: as many tensors each, those of one place with as many elements.
        limit: how many elements a group has of each list at most, unless it is a single tensor.
    """
    sizes = [tensor.numel() for tensor in lists[0]]
    start, total = 0, 0
    for place in range(len(sizes) + 1):
        is_full = place == len(sizes) or total + sizes[place] > limit
        if place > start and is_full:
            yield slice(start, place), [[tensor.detach() for tensor in tensors[start:place]] for tensors in lists]
            start, total = place, 0
        total += sizes[place] if place < len(sizes) else 0


def cut(group: Piece, limit: int) -> Iterator[Piece]:
    """Yield a group in pieces: itself, or views of the parts of its only tensor, if that has more elements.

    A tensor of another class, such as a shard, stays whole, and so does one in a format of its device's own.
    """
    row = [tensors[0] for tensors in group]
    size = row[0].numel()
    if (
        len(group[0]) > 1
        or size <= limit
        or not all(type(t) is torch.Tensor and kernels.in_usual_format([t])[0] is t for t in row)
    ):
        yield group
        return
    if all(tensor.is_contiguous() for tensor in row):
        row = [tensor.view(-1) for tensor in row]
    longest = max(range(row[0].dim()), key=row[0].size)
    length = max(1, limit * row[0].size(longest) // size)
    for parts in zip(*(tensor.split(length, longest) for tensor in row), strict=True):
        yield [[part] for part in parts]


def apply(
    rule: Callable[[Piece], object],
    lists: Lists,
    limit: int,
    copies: Lists = (),
    skip: torch.Tensor | None = None,
    obeys: bool = False,
) -> None:
    """Apply ``rule`` to the lists in pieces. It gets gradients and states in fp32 and writes into the states.

    Args:
        rule: see above.
        lists: the gradients, which stay, and the states, of which the parameters are the first.
        limit: how many elements a piece has at most.
        copies: lists of tensors that the new parameters are written to, besides.
        skip: see :func:`store`.
        obeys: the rule makes no temporaries, and writes nothing where ``skip`` is not zero.
    """

    def step(piece: Piece) -> None:
        work = [opened(tensors, skip is not None and not obeys) for tensors in piece[1 : len(lists)]]
        rule([floats(piece[0]), *work])
        for targets, values in zip(piece[1:], [*work, *work[:1] * len(copies)], strict=True):
            store(targets, values, skip)

    everything = [[tensor.detach() for tensor in tensors] for tensors in (*lists, *copies)]
    makes_none = obeys and not (copies and skip is not None)
    if makes_none and all(map(_are_fp32, everything[: len(lists)])):
        step(everything)
        return
    for _, group in groups(everything, limit):
        for piece in cut(group, limit):
            step(piece)


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in fp32, and as operators on lists take them: see :func:`kernels.in_usual_format`.

    Those of 16 bits are copies. Where nothing is to do, a detached tensor is the very same.
    """
    held = [t.detach() if t.requires_grad else t for t in tensors]
    return kernels.in_usual_format([t.float() if t.dtype in _LOWER else t for t in held])


def opened(tensors: Sequence[torch.Tensor], apart: bool = False) -> list[torch.Tensor]:
    """Return detached tensors in fp32 to write into: themselves where that is possible, unless ``apart``.

    What was written into a copy gets back by :func:`store`.
    """
    return [w.clone() if apart and w is t else w for t, w in zip(tensors, floats(tensors), strict=True)]


def store(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], skip: torch.Tensor | None = None) -> None:
    """Write ``values`` into ``targets``, in their dtypes.

    Args:
        targets: tensors of any floating dtype.
        values: as many, of the same shapes. A value that is its target itself has been written.
        skip: where this is not zero, on the device, the targets keep what they hold.
    """
    pairs = [(t.detach(), v) for t, v in zip(targets, values, strict=True) if v is not t]
    if skip is not None:
        raised = skip.reshape(()) != 0
        pairs = [(t, torch.where(raised.to(t.device), t, v.to(t.dtype))) for t, v in pairs]
    if pairs:
        kernels.copy_([target for target, _ in pairs], [value for _, value in pairs])


def _are_fp32(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(operator.is_, tensors, floats(tensors)))
