"""PyTorch Geometric: three kinds of graph convolutions.

Covers: xamp.casting.forward, xamp.values.containers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, check, library
from torch import nn
from torch.nn.functional import cross_entropy

pyg = library("torch_geometric.nn")

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 5, 0], [1, 0, 2, 1, 4, 3, 5, 4, 5]])


class Net(nn.Module):
    """Two layers of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = getattr(pyg, kind)(8, 16)
        self.second = getattr(pyg, kind)(16, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def loss(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    return cross_entropy(output.float(), torch.tensor([0, 1, 2, 0, 1, 2]))


CASES = [
    Case(
        "torch-geometric",
        kind,
        lambda kind=kind: Net(kind),  # type: ignore[misc]
        lambda: {"x": torch.randn(6, 8), "edge_index": EDGES},
        loss,
    )
    for kind in ("GCNConv", "GATConv", "SAGEConv")
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_by_hand_and_resumes(case: Case, level: str) -> None:
    check(case, level)
