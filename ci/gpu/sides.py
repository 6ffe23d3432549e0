"""One training script under the real Apex and under xamp.apex: scales, losses and weights of many trajectories.

    python -m ci.gpu.sides SOURCE DEVICE FILE [--steps N] [--sample K]

Nets, levels, scales, optimizers and injected infs are combined. What a case raises is written down in its place. SOURCE
is the folder that has the real Apex's package; ``xamp`` puts xamp.apex beside itself, to see that all runs. FILE gets
what was found, as JSON. Exit code 1 where scales differ, or one side raises and the other does not. Each side runs in a
process of its own, which imports its apex (``--side``).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Case", "cases", "compare"]

SIDES = {"apex": "apex", "xamp": "xamp.apex"}
LEVELS, SCALES = ("O0", "O1", "O2", "O3"), (None, 128.0, "dynamic")
INFS = ((), (3, 7))
"""The steps at which a gradient is made inf."""


def conv() -> nn.Module:
    """Two convolutions with batch norm, and layers around a layer norm. Input (n, 3, 16, 16), logits (n, 10)."""
    first = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    second = (nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(32 * 36, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))


class Tokens(nn.Module):
    """Attention over what an LSTM makes of the input of :func:`conv`, taken as 16 tokens of 48 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.qkv, self.head = nn.LSTM(48, 32, batch_first=True), nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (n, 10)."""
        tokens = self.lstm(x.reshape(len(x), 16, 48))[0]
        q, k, v = self.qkv(tokens).chunk(3, -1)
        mixed = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(1, 2)) / 8, -1), v)
        return self.head((tokens + mixed).mean(1))  # type: ignore[no-any-return]


NETS: dict[str, Callable[[], nn.Module]] = {"conv": conv, "tokens": Tokens}
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda _, p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda _, p: torch.optim.Adam(p, 1e-3, eps=1e-4),
    "FusedAdam": lambda own, p: own.FusedAdam(p, 1e-3, eps=1e-4),
    "FusedSGD": lambda own, p: own.FusedSGD(p, 0.05, momentum=0.9),
    "FusedLAMB": lambda own, p: own.FusedLAMB(p, 1e-3),
    "FusedNovoGrad": lambda own, p: own.FusedNovoGrad(p, 1e-3),
}


class Case(NamedTuple):
    """One trajectory: the net, the level, the loss scale, the optimizer, and the steps with an inf."""

    net: str
    level: str
    scale: float | str | None
    optimizer: str
    infs: tuple[int, ...]

    def __str__(self) -> str:
        told = f"{self.net}, {self.level}, {self.optimizer}, scale {self.scale or 'by default'}"
        return told + ", infs" * bool(self.infs)


def cases() -> Iterator[Case]:
    """All cases that say something."""
    for each in itertools.starmap(Case, itertools.product(NETS, LEVELS, SCALES, OPTIMIZERS, INFS)):
        is_static = each.scale == 128.0 or (each.level in ("O0", "O3") and each.scale is None)
        reach = each.infs and is_static  # the infs would reach the weights
        twice = each.net != "conv" and each.scale == 128.0
        if not (reach or twice or (each.level == "O3" and each.optimizer == "FusedNovoGrad")):
            yield each


def trajectory(side: str, case: Case, device: str, steps: int) -> dict[str, Any]:
    """Train; return ``scales`` of each step, and the ``weights`` at the end, fp32 on the host."""
    package = SIDES[side]
    amp: Any = importlib.import_module(f"{package}.amp")
    own = importlib.import_module(f"{package}.optimizers")
    torch.manual_seed(0)
    model = NETS[case.net]().to(device)
    optimizer = OPTIMIZERS[case.optimizer](own, model.parameters())
    scale = {} if case.scale is None else {"loss_scale": case.scale}
    model, optimizer = amp.initialize(model, optimizer, opt_level=case.level, verbosity=0, **scale)
    try:
        return _train(amp, model, optimizer, case, device, steps)
    finally:
        handle = getattr(amp._amp_state, "handle", None)
        if case.level == "O1" and handle is not None:
            handle._deactivate()  # else the next case would run under its casts


def _train(amp: Any, model: nn.Module, optimizer: Any, case: Case, device: str, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    scales = []
    for step in range(steps):
        x = torch.randn(32, 3, 16, 16, generator=generator).to(device)
        y = torch.randint(0, 10, (32,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if step in case.infs:
                grad = next(iter(model.parameters())).grad
                assert grad is not None
                grad.view(-1)[0] = float("inf")
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        scales.append([each["loss_scale"] for each in amp.state_dict().values()])
    weights = [p.detach().float().cpu() for p in amp.master_params(optimizer)]
    return {"scales": scales, "weights": weights}


def all_of(side: str, chosen: Iterable[Case], device: str, steps: int) -> dict[str, dict[str, Any]]:
    """Each case's trajectory, or ``error``, by the case's name."""
    found: dict[str, dict[str, Any]] = {}
    for case in chosen:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[str(case)] = trajectory(side, case, device, steps)
        except Exception as error:
            found[str(case)] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        if len(found) % 20 == 0:
            print(f"{side}: {len(found)} trajectories", flush=True)
    return found


def compare(apex: Mapping[str, Any], xamp: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of the same cases have in common: numbers of cases, and sentences on those that are different.

    The worst gap is, by net, level and optimizer, the norm of the difference of the weights over the norm of Apex's.
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


def _side(side: str, source: str, given: argparse.Namespace, file: Path) -> dict[str, Any]:
    """The trajectories of one side, by another process."""
    path = [source if side == "apex" else "", os.environ.get("PYTHONPATH", "")]
    options = ["--steps", str(given.steps), "--sample", str(given.sample), "--side", side]
    command = [sys.executable, "-m", "ci.gpu.sides", source, given.device, str(file), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = torch.load(file)
    return found


def main(words: Sequence[str]) -> int:
    """Run both sides, or one; see the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.sides")
    for name in ("source", "device", "file"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample", type=int, default=1, help="each so many-th case")
    parser.add_argument("--side", choices=SIDES)
    given = parser.parse_args(words)
    if given.side:
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.save(all_of(given.side, list(cases())[:: given.sample], given.device, given.steps), given.file)
        return 0
    with tempfile.TemporaryDirectory(prefix="xamp-sides-") as folder:
        itself = given.source == "xamp"
        theirs = _side("xamp" if itself else "apex", given.source, given, Path(folder) / "first.pt")
        found = compare(theirs, _side("xamp", "xamp", given, Path(folder) / "second.pt"))
    found["beside"] = "xamp.apex itself" if itself else "the real Apex"
    Path(given.file).write_text(json.dumps(found), encoding="utf-8")
    print(*(f"{key}: {each}" for key, each in found.items() if key != "different"), *found["different"][:30], sep="\n")
    return int(bool(found["different"]) or not found["equal scales"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
