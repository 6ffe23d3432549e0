"""A training step that ``xamp.trace`` records over one that it does not, at the default rate of samples.

A round is as many steps as one sample stands for, so that each round holds one sampled step. The first 10 steps, which
are all sampled, come before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import xamp
from benchmarks import bounds
from benchmarks.report import Figure, of_ratio
from benchmarks.timing import compare
from xamp.debug.recorder import EVERY

WIDTHS = {"MLP, 6 layers of 256, batch 64": (256, 6, 64), "MLP, 3 layers of 64, batch 32": (64, 3, 32)}


class _Loop:
    """One training loop; the same model and memory with a recorder and without, so that only the recorder differs."""

    def __init__(self, device: torch.device, width: int, depth: int, batch: int, path: Path) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        xamp.initialize(self.model, self.optimizer, level="O0", verbosity=0)
        self.x = torch.randn(batch, width, device=device)
        self.recorder = xamp.trace(path, self.model, self.optimizer)

    def bare(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.x).square().mean()
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss

    def recorded(self) -> None:
        self.recorder.step(self.bare())


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Measure a model of usual size, and for information a very small one."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, sizes) in enumerate(WIDTHS.items()):
            loop = _Loop(device, *sizes, Path(folder) / f"{index}.trace")
            for _ in range(10):
                loop.recorded()
            pair = compare(
                loop.recorded, loop.bare, device, calls=EVERY, rounds=max(min(10, rounds), rounds // 4), warm_up=EVERY
            )
            figures.append(of_ratio(name, pair, None if index else bounds.TRACE_RATIO))
            loop.recorder.close()
    return figures
