"""What the benchmark of ``xamp.apex``'s optimizers counts, of calls whose bytes are known.

Covers: benchmarks.apex_optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.apex_optimizers import Moves
from xamp.torch_compat.torch_private import operators

SIZE = 100
CALLS: dict[str, tuple[Callable[[Any, Any], object], int, int]] = {
    "new": (lambda x, y: x + y, 1, 12),
    "in place": (lambda x, y: x.add_(y), 1, 12),
    "copy": (lambda x, y: x.copy_(y), 1, 8),
    "cast": (lambda x, y: x.half(), 1, 6),
    "views": (lambda x, y: (x.view(10, 10), x.detach(), y.split(7)), 0, 0),
    "lists": (lambda x, y: operators.foreach_add_([x, x], [y, y]), 1, 24),
    "copy of lists": (lambda x, y: operators.foreach_copy_([x], [y]), 1, 8),
    "fused": (lambda x, y: torch.optim.SGD([x], fused=True).step(), 1, 12),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_and_calls(name: str) -> None:
    call, calls, moved = CALLS[name]
    x, y = torch.nn.Parameter(torch.ones(SIZE)), torch.ones(SIZE)
    x.grad = torch.ones(SIZE)
    with torch.no_grad(), Moves() as moves:
        call(x, y)
    assert (moves.calls, moves.bytes) == (calls, moved * SIZE)
