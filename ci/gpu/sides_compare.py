"""Runs ``ci.gpu.sides`` under the real Apex and under xamp.apex, and compares what came out.

    python -m ci.gpu.sides_compare SOURCE DEVICE FILE [--steps N] [--sample K]

SOURCE is the folder that has the real Apex's package; ``xamp`` puts xamp.apex beside itself, to see that all runs. FILE
gets what was found, as JSON. Exit code 1 where scales differ, or one side raises and the other does not.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["compare"]

ITSELF = "xamp"
_SHOWN = 30


def compare(apex: Mapping[str, Any], xamp: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of the same cases have in common.

    Args:
        apex: Apex's trajectories, by case.
        xamp: xamp's.

    Returns:
        ``cases``, ``both raise``, ``equal scales`` (numbers); ``bit-equal weights``, by level and optimizer, as
        ``"3 of 4"``; ``worst gap``, by net, level and optimizer: the norm of the difference of the weights over the
        norm of Apex's; ``different``: sentences on the cases whose scales or errors are not the same.
    """
    same: dict[str, list[bool]] = collections.defaultdict(list)
    gaps: dict[str, float] = {}
    different, raising = [], 0
    for case, theirs in apex.items():
        ours = xamp[case]
        if "error" in theirs and "error" in ours:
            raising += 1
        elif difference := _difference(theirs, ours):
            different.append(f"{case}: {difference}")
        else:
            net, level, optimizer = case.split(", ")[:3]
            pairs = list(zip(theirs["weights"], ours["weights"], strict=True))
            same[f"{level} {optimizer}"].append(all(torch.equal(a, b) for a, b in pairs))
            key = f"{net} {level} {optimizer}"
            gaps[key] = max(gaps.get(key, 0.0), _gap(pairs))
    return {
        "cases": len(apex),
        "both raise": raising,
        "equal scales": len(apex) - raising - len(different),
        "bit-equal weights": {key: f"{sum(each)} of {len(each)}" for key, each in same.items()},
        "worst gap": {key: float(f"{gap:.2g}") for key, gap in gaps.items() if gap},
        "different": different,
    }


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How two trajectories differ in scales or errors; empty if they do not."""
    if "error" in theirs or "error" in ours:
        return f"Apex {theirs.get('error', 'trains')}; xamp {ours.get('error', 'trains')}"
    steps = [i for i, (a, b) in enumerate(zip(theirs["scales"], ours["scales"], strict=True)) if a != b]
    return f"scales differ first at step {steps[0]}" if steps else ""


def _gap(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    norm = sum(float(a.double().square().sum()) for a, _ in pairs)
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((apart / norm) ** 0.5) if norm else 0.0


def main(source: str, device: str, file: str, *options: str) -> int:
    """Run both sides; see the module."""
    with tempfile.TemporaryDirectory(prefix="xamp-sides-") as folder:
        first = _side("xamp" if source == ITSELF else "apex", source, device, Path(folder) / "first.pt", options)
        second = _side("xamp", ITSELF, device, Path(folder) / "second.pt", options)
        found = compare(first, second)
    found["beside"] = "xamp.apex itself" if source == ITSELF else "the real Apex"
    Path(file).write_text(json.dumps(found), encoding="utf-8")
    for key in ("cases", "both raise", "equal scales", "bit-equal weights", "worst gap"):
        print(f"{key}: {found[key]}")
    print("\n".join(found["different"][:_SHOWN]))
    return int(bool(found["different"]) or not found["equal scales"])


def _side(side: str, source: str, device: str, file: Path, options: Sequence[str]) -> dict[str, Any]:
    """The trajectories of one side, in a process of its own, which imports its apex."""
    path = [*([] if source == ITSELF else [source]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "ci.gpu.sides", side, device, str(file), *options]
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = torch.load(file)
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
