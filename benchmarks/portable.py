"""Whole steps under the portable op policy over the same under the device's native one, for several families of models.

A process cannot remove the entries that the portable policy adds, and pays for them under every autocast. So each side
runs in its own processes, alternating, as in :mod:`benchmarks.ops`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import bounds, ways
from benchmarks.nets import NETS, Net, rows
from benchmarks.report import Figure
from benchmarks.timing import seconds
from benchmarks.ways import DTYPES, Task
from xamp.testing.measure import quartiles

WIDTH = 64
ROUND_S = 0.05
"""Seconds of a round. The fastest of :data:`ROUNDS` counts: processes that are compared ran under different load."""
ROUNDS = 11

Times = dict[str, float]


class Normed(nn.Module):
    """A linear layer behind a norm, which the portable policy runs in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Softmax(nn.Module):
    """Attention by single operators: products in the lower dtype, softmax in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.into(x)
        return self.norm(x + torch.softmax(q @ q.t(), -1) @ q)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A GRU over eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.cells(x[:, None].expand(-1, 8, -1))
        return self.head(found[:, -1])  # type: ignore[no-any-return]


def stacked(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for _ in range(count)), nn.Linear(WIDTH, 10))


def family(make: Callable[[], nn.Module]) -> Net:
    return Net(make, rows, "rows", True, ((16, WIDTH),), (256, WIDTH))


FAMILIES = {
    **{name: net for name, net in NETS.items() if not net.large},
    "20 norms and linear layers": family(stacked(Normed, 20)),
    "10 softmax": family(stacked(Softmax, 10)),
    "GRU": family(Recurrent),
}


def run(device: torch.device, quick: bool) -> list[Figure]:
    pairs = []
    for turn in range(2 if quick else 5):
        sides = ("portable", "native") if turn % 2 else ("native", "portable")
        done = {side: _child(side, device) for side in sides}
        pairs.append((done["portable"], done["native"]))
    figures = []
    for case in pairs[0][0]:
        ours, theirs = ([pair[side][case] for pair in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        detail = f"{statistics.median(ours) * 1e6:7.1f} us : {statistics.median(theirs) * 1e6:7.1f} us"
        value = statistics.median(ratios)
        figures.append(Figure(case, value, "ratio", bounds.PORTABLE_RATIO, detail, quartiles(ratios)))
    return figures


def _child(side: str, device: torch.device) -> Times:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "benchmarks.portable", side, str(device)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=600).stdout
    return json.loads(out)  # type: ignore[no-any-return]


def measured(side: str, device: torch.device) -> Times:
    """Seconds of a step of each family in each dtype, under one policy."""
    found = {}
    for name, net in FAMILIES.items():
        for dtype in DTYPES:
            with ways.quiet():
                step = ways.ours(Task.of(net, net.sizes(device)[-1], device, dtype), op_policy=side)
                found[f"{name}, {dtype}"] = _fastest(step, device)
    return found


def _fastest(step: Callable[[], object], device: torch.device) -> float:
    seconds(step, device, 5)
    calls = max(1, int(ROUND_S / seconds(step, device, 1)))
    return min(seconds(step, device, calls) for _ in range(ROUNDS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1], torch.device(sys.argv[2]))))
