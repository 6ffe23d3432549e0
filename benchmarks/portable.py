"""Whole steps under the portable op policy over the same under the device's native one, for several families of models.

A process cannot remove the entries that the portable policy adds, and pays for them under every autocast. So each side
runs in a process of its own, and the two take turns. Where a process has its memory moves its times by some percent
for as long as it lives, so several pairs of processes are asked, one after the other.
"""

from __future__ import annotations

import dataclasses
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

ROUND_S = 0.05
"""Seconds of a round. The sides take turns round by round, so that they run under the same load."""
ROUNDS = 4
"""Rounds of each case in each pair of processes."""
PAIRS = {True: 2, False: 14}
"""Pairs of processes, by ``--quick``. The ratio of one pair has a standard deviation of 0.04 to 0.12, and hardly a
smaller one with more rounds: ten pairs of four rounds are worth more than four of ten."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Rows in a batch, and numbers in a row."""

    rows: int
    width: int


REAL, TINY = Size(128, 128), Size(16, 64)
"""A sentence in a small transformer; and where the host's work for an operator is as long as the operator."""


class Normed(nn.Module):
    """A linear layer behind a norm, which the portable policy runs in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Softmax(nn.Module):
    """Attention by single operators: products in the lower dtype, softmax in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.into(x)
        return self.norm(x + torch.softmax(q @ q.t(), -1) @ q)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A GRU over eight times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.cells(x[:, None].expand(-1, 8, -1))
        return self.head(found[:, -1])  # type: ignore[no-any-return]


def family(make: Callable[[int], nn.Module], count: int, size: Size) -> Net:
    def stack() -> nn.Module:
        return nn.Sequential(*(make(size.width) for _ in range(count)), nn.Linear(size.width, 10))

    return Net(stack, rows, "rows", True, ((size.rows, size.width),), (256, size.width))


def recurrent(size: Size) -> Net:
    return Net(lambda: Recurrent(size.width), rows, "rows", True, ((size.rows, size.width),), (256, size.width))


BOUND = {
    **{name: net for name, net in NETS.items() if not net.large},
    "20 norms and linear layers": family(Normed, 20, REAL),
    "10 softmax": family(Softmax, 10, REAL),
    "GRU": recurrent(TINY),
}
FAMILIES = {
    **BOUND,
    f"20 norms and linear layers, {TINY.rows} x {TINY.width}": family(Normed, 20, TINY),
    f"10 softmax, {TINY.rows} x {TINY.width}": family(Softmax, 10, TINY),
}
"""All families; those of :data:`BOUND` must keep the bound. In the others the tensors are so small that an added
operator, which runs a few microseconds of Python, takes longer than what it computes."""


def run(device: torch.device, quick: bool, most: int) -> list[Figure]:
    """Measure, by at most ``most`` rounds of each case and side."""
    rounds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(min(PAIRS[quick], max(1, most // ROUNDS))):
        for case, found in _pair_of_processes(device).items():
            rounds.setdefault(case, []).extend(found)
    return [_figure(name, dtype, found) for (name, dtype), found in rounds.items()]


def _pair_of_processes(device: torch.device) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the rounds of each family and dtype in a new process for each side."""
    sides = {side: Side(side, device) for side in ("portable", "native")}
    try:
        return {
            (name, dtype): [_round(sides, f"{name}, {dtype}", turn) for turn in range(ROUNDS + 1)][1:]
            for name in FAMILIES
            for dtype in DTYPES
        }
    finally:
        for side in sides.values():
            side.close()


def _round(sides: dict[str, Side], case: str, turn: int) -> tuple[float, float]:
    """Seconds of a step under both policies, measured one after the other."""
    found = {side: sides[side].seconds(case) for side in (list(sides) if turn % 2 else list(sides)[::-1])}
    return found["portable"], found["native"]


def _figure(name: str, dtype: str, pairs: list[tuple[float, float]]) -> Figure:
    ratios = [ours / theirs for ours, theirs in pairs]
    medians = [statistics.median(side) * 1e6 for side in zip(*pairs, strict=True)]
    detail = f"{medians[0]:7.1f} us : {medians[1]:7.1f} us"
    bound = bounds.PORTABLE_RATIO if name in BOUND else None
    return Figure(f"{name}, {dtype}", statistics.median(ratios), "ratio", bound, detail, quartiles(ratios))


class Side:
    """A process that trains under one policy when it is asked."""

    def __init__(self, side: str, device: torch.device) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.portable", side, str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def seconds(self, case: str) -> float:
        """Seconds of a step of ``case``, the mean over a round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(case, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def serve(side: str, device: torch.device) -> None:
    """Run a round of each case that is asked for on the standard input, under one policy."""
    steps: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in steps:
            steps.clear()  # one model at a time
            name, _, dtype = case.rpartition(", ")
            net = FAMILIES[name]
            with ways.quiet():
                steps[case] = ways.ours(Task.of(net, net.sizes(device)[-1], device, dtype), op_policy=side)
                seconds(steps[case], device, 5)
        with ways.quiet():
            calls = max(1, int(ROUND_S / seconds(steps[case], device, 1)))
            print(seconds(steps[case], device, calls), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(sys.argv[1], torch.device(sys.argv[2]))
