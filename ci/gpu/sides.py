"""The trainings of tests/support/apex_training.py under the real Apex and under xamp.apex, on a device.

    python -m ci.gpu.sides SOURCE DEVICE FILE [STEP]

SOURCE is the folder that has the real Apex's package; ``xamp`` puts xamp.apex beside itself, to see that all runs. FILE
gets what was found, as JSON. Besides the optimizers of the cases, their grid is walked with those of Apex. STEP: each
so many-th case only. Exit code 1 where scales or skipped steps differ, or one side raises and the other does not. Each
side runs in a process of its own, which imports its apex: ``python -m ci.gpu.sides --side PACKAGE DEVICE FILE STEP``.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FusedAdam": {"lr": 1e-3, "eps": 1e-4},
    "FusedSGD": {"lr": 0.05, "momentum": 0.9},
    "FusedLAMB": {"lr": 1e-3},
    "FusedNovoGrad": {"lr": 1e-3},
}


def trained(package: str, device: str, step: int) -> dict[str, Any]:
    """What each case came to under ``package``, or what it raised, by the case's name."""
    sys.path.append(str(ROOT / "tests" / "support"))
    training: Any = importlib.import_module("apex_training")
    amp: Any = importlib.import_module(f"{package}.amp")
    own: Any = importlib.import_module(f"{package}.optimizers")

    def moved(make: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
        return lambda: make().to(device)

    batch, digest, usual = training.batch, training.digest, training.Run._optimizer
    training.Trunk, training.Head = moved(training.Trunk), moved(training.Head)
    training.batch = lambda *given: tuple(tensor.to(device) for tensor in batch(*given))
    training.digest = lambda tensors: digest(tensor.cpu() for tensor in tensors)
    wanted = [("", case) for case in training.CASES]
    wanted += [(name, case) for name in OPTIMIZERS for case in training._grid() if case.kind == "sgd"]
    found: dict[str, Any] = {}
    for name, case in wanted[::step]:
        fused = lambda _, model, name=name: getattr(own, name)(model.parameters(), **OPTIMIZERS[name])  # noqa: E731
        training.Run._optimizer = fused if name else usual
        try:
            about = training.run(amp, case)
        except Exception as error:
            about = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        found[f"{name or case.kind}, {case.level}, {case.name}"] = about
        if len(found) % 20 == 0:
            print(f"{package}: {len(found)} trajectories", flush=True)
    return found


def compare(apex: Mapping[str, Any], xamp: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of the same cases have in common: numbers of cases, and sentences on those that are different."""
    same: dict[str, list[bool]] = collections.defaultdict(list)
    different, raising = [], 0
    for case, theirs in apex.items():
        ours = xamp[case]
        if "error" in theirs and "error" in ours:
            raising += 1
        elif "error" in theirs or "error" in ours:
            told = (theirs.get("error", "trains"), ours.get("error", "trains"))
            different.append(f"{case}: Apex {told[0]}; xamp {told[1]}")
        elif wrong := [key for key in ("scales", "unskipped", "skipped") if theirs[key] != ours[key]]:
            different.append(f"{case}: {', '.join(wrong)} differ")
        else:
            same[", ".join(case.split(", ")[:2])].append(theirs["sha256"] == ours["sha256"])
    return {
        "cases": len(apex),
        "both raise": raising,
        "equal scales": len(apex) - raising - len(different),
        "bit-equal weights": {key: f"{sum(each)} of {len(each)}" for key, each in same.items()},
        "different": different,
    }


def main(source: str, device: str, file: str, step: str = "1") -> int:
    """Run both sides; see the module."""
    found = []
    for package in ("xamp.apex" if source == "xamp" else "apex", "xamp.apex"):
        with tempfile.TemporaryDirectory(prefix="xamp-sides-") as folder:
            path = os.pathsep.join([*([source] if package == "apex" else []), os.environ.get("PYTHONPATH", "")])
            words = [sys.executable, "-m", "ci.gpu.sides", "--side", package, device, f"{folder}/found.json", step]
            subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=True)
            found.append(json.loads(Path(folder, "found.json").read_text(encoding="utf-8")))
    about = {**compare(*found), "beside": "xamp.apex itself" if source == "xamp" else "the real Apex"}
    Path(file).write_text(json.dumps(about), encoding="utf-8")
    print(*(f"{key}: {each}" for key, each in about.items() if key != "different"), *about["different"][:30], sep="\n")
    return int(bool(about["different"]) or not about["equal scales"])


def _side(package: str, device: str, file: str, step: str) -> int:
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    Path(file).write_text(json.dumps(trained(package, device, int(step))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_side(*sys.argv[2:]) if sys.argv[1] == "--side" else main(*sys.argv[1:]))
