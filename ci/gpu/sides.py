"""One training script under the real Apex or under xamp.apex: scales, losses and weights of many trajectories.

    python -m ci.gpu.sides apex|xamp DEVICE FILE [--steps N] [--sample K]

Nets, levels, scales, optimizers and injected infs are combined. What a case raises is written down in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SIDES", "Case", "cases"]

SIDES = {"apex": "apex", "xamp": "xamp.apex"}
LEVELS = ("O0", "O1", "O2", "O3")
SCALES = (None, 128.0, "dynamic")
INFS = ((), (3, 7))
"""The steps at which a gradient is made inf."""
_ROWS, _WIDTH, _LENGTH = 32, 48, 16


class Conv(nn.Module):
    """Two convolutions with batch norm. Input (n, 3, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (n, 10)."""
        x = F.relu(self.first_norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """One layer of attention. Input as for :class:`Conv`, taken as 16 tokens of 48 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(_WIDTH, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.last, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (n, 10)."""
        tokens = self.embed(x.reshape(len(x), _LENGTH, _WIDTH))
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / 8, -1)
        tokens = tokens + self.out(torch.matmul(weights, v))
        return self.head(F.gelu(self.last(tokens)).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM. Input as for :class:`Attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(_WIDTH, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (n, 10)."""
        return self.head(self.lstm(x.reshape(len(x), _LENGTH, _WIDTH))[0][:, -1])  # type: ignore[no-any-return]


NETS: dict[str, type[nn.Module]] = {"conv": Conv, "attention": Attention, "lstm": Recurrent}
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda _, p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda _, p: torch.optim.Adam(p, 1e-3, eps=1e-4),
    "FusedAdam": lambda own, p: own.FusedAdam(p, 1e-3, eps=1e-4),
    "FusedSGD": lambda own, p: own.FusedSGD(p, 0.05, momentum=0.9),
    "FusedLAMB": lambda own, p: own.FusedLAMB(p, 1e-3),
    "FusedNovoGrad": lambda own, p: own.FusedNovoGrad(p, 1e-3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One trajectory: the net, the level, the loss scale, the optimizer, and the steps with an inf."""

    net: str
    level: str
    scale: float | str | None
    optimizer: str
    infs: tuple[int, ...]

    def __str__(self) -> str:
        told = [self.net, self.level, self.optimizer, f"scale {self.scale or 'by default'}"]
        return ", ".join([*told, *(["infs"] if self.infs else [])])


def cases() -> Iterator[Case]:
    """All cases that say something."""
    for each in itertools.starmap(Case, itertools.product(NETS, LEVELS, SCALES, OPTIMIZERS, INFS)):
        is_static = each.scale == 128.0 or (each.level in ("O0", "O3") and each.scale is None)
        if each.infs and is_static:
            continue  # the infs would reach the weights
        if each.net != "conv" and each.scale == 128.0:
            continue
        if each.level == "O3" and each.optimizer == "FusedNovoGrad":
            continue
        yield each


def trajectory(side: str, case: Case, device: str, steps: int) -> dict[str, Any]:
    """Train; return ``scales`` and ``losses`` of each step, and the ``weights`` at the end, fp32 on the host."""
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
    scales, losses = [], []
    for step in range(steps):
        x = torch.randn(_ROWS, 3, 16, 16, generator=generator).to(device)
        y = torch.randint(0, 10, (_ROWS,), generator=generator).to(device)
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
        losses.append(loss.item())
    weights = [p.detach().float().cpu() for p in amp.master_params(optimizer)]
    return {"scales": scales, "losses": losses, "weights": weights}


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


def main(words: Sequence[str]) -> int:
    """Run one side; see the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.sides")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("device")
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample", type=int, default=1, help="each so many-th case")
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    chosen = list(cases())[:: args.sample]
    torch.save(all_of(args.side, chosen, args.device, args.steps), args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
