"""The portable op policy: the cost of an added operator inside a region, and what other code pays for the entries.

A process cannot remove the entries again, so each side is timed in its own processes, alternating.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import bounds
from benchmarks.report import Figure

Times = dict[str, dict[str, float]]

x = torch.linspace(-1.0, 1.0, 64).reshape(8, 8)
y, row = x.bfloat16(), x[0].clone()
weights = [torch.ones(24, 8), torch.ones(24, 8), torch.ones(24), torch.ones(24)]

# Operators that a CPU's own list lacks: a call as a model writes it, and the same call with the table's casts by hand.
ADDED: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "exp": (lambda: torch.exp(y), lambda: torch.exp(y.float())),
    "softmax": (lambda: torch.softmax(y, -1), lambda: torch.softmax(y, -1, dtype=torch.float32)),
    "sum": (lambda: y.sum(), lambda: y.sum(dtype=torch.float32)),
    "pow": (lambda: y**1.5, lambda: y.float() ** 1.5),
    "layer_norm": (lambda: F.layer_norm(y, (8,)), lambda: F.layer_norm(y.float(), (8,))),
    "mv": (lambda: torch.mv(x, row), lambda: torch.mv(x.bfloat16(), row.bfloat16())),
    "addcmul": (lambda: torch.addcmul(y, x, y), lambda: torch.addcmul(y.float(), x, y.float())),
    "einsum": (
        lambda: torch.einsum("ij,jk->ik", x, x),
        lambda: torch.einsum("ij,jk->ik", x.bfloat16(), x.bfloat16()),
    ),
    "gru_cell": (
        lambda: torch.gru_cell(x, x, *weights),
        lambda: torch.gru_cell(x.bfloat16(), x.bfloat16(), *(w.bfloat16() for w in weights)),
    ),
}
LISTED = {name: ADDED[name][0] for name in ("exp", "softmax", "sum", "mv")}
UNLISTED: dict[str, Callable[[], object]] = {"relu": lambda: torch.relu(y), "mm": lambda: torch.mm(x, x)}


def run(processes: int = 7) -> list[Figure]:
    pairs = []
    for turn in range(processes):
        sides = ("with", "without") if turn % 2 else ("without", "with")
        done = {side: _child(side) for side in sides}
        pairs.append((done["with"], done["without"]))
    return [
        *(_difference(pairs, f"added: {name}", "added") for name in ADDED),
        *(_ratio(pairs, "outside", name, bounds.OPS_OUTSIDE_RATIO) for name in (*LISTED, *UNLISTED)),
        *(_ratio(pairs, "foreign", name, bounds.OPS_OUTSIDE_RATIO) for name in UNLISTED),
        *(_difference(pairs, f"another's autocast: {name}", "foreign", None) for name in LISTED),
    ]


def _child(side: str) -> Times:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "benchmarks.ops", side]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300).stdout
    return json.loads(out)  # type: ignore[no-any-return]


def _difference(
    pairs: list[tuple[Times, Times]], case: str, state: str, bound: float | None = bounds.OPS_ADDED_US
) -> Figure:
    name = case.rpartition(" ")[2]
    ours, theirs = ([pair[side][state][name] for pair in pairs] for side in (0, 1))
    detail = f"{statistics.median(ours):7.2f} us : {statistics.median(theirs):7.2f} us"
    value = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    return Figure(case, value, "us", bound, detail)


def _ratio(pairs: list[tuple[Times, Times]], state: str, name: str, bound: float) -> Figure:
    where = {"outside": "outside of autocast", "foreign": "another's autocast"}[state]
    ours, theirs = ([pair[side][state][name] for pair in pairs] for side in (0, 1))
    detail = f"{statistics.median(ours):7.2f} us : {statistics.median(theirs):7.2f} us"
    value = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Figure(f"{where}: {name}", value, "x", bound, detail)


def _measure(side: str) -> Times:
    """Microseconds for one call on one side: with a portable session in the process, or in plain torch."""
    torch.set_num_threads(1)
    region: Any = torch.autocast("cpu", dtype=torch.bfloat16)
    written = {name: by_hand for name, (_, by_hand) in ADDED.items()}
    if side == "with":
        import xamp

        model = xamp.initialize(torch.nn.Linear(1, 1), level="O4", op_policy="portable", backend="cpu", verbosity=0)
        region = xamp.session(model).autocast()
        written = {name: as_written for name, (as_written, _) in ADDED.items()}
    others = {**LISTED, **UNLISTED}
    with torch.no_grad():
        times = {"outside": {name: _time(call) for name, call in others.items()}}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            times["foreign"] = {name: _time(call) for name, call in others.items()}
        with region:
            times["added"] = {name: _time(call) for name, call in written.items()}
    return times


def _time(call: Callable[[], object], calls: int = 1000, rounds: int = 11) -> float:
    """The fastest round, because the two processes that are compared ran under different load."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return min(found)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
