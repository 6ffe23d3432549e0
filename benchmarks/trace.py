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
    def __init__(self, device: torch.device, width: int, depth: int, batch: int, path: Path | None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        xamp.initialize(self.model, self.optimizer, level="O0", verbosity=0)
        self.x = torch.randn(batch, width, device=device)
        self.recorder = None if path is None else xamp.trace(path, self.model, self.optimizer)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        if self.recorder is not None:
            self.recorder.step(loss)


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Measure a model of usual size, and for information a very small one."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, sizes) in enumerate(WIDTHS.items()):
            ours, bare = _Loop(device, *sizes, Path(folder) / f"{index}.trace"), _Loop(device, *sizes, None)
            for _ in range(10):
                ours()
            pair = compare(ours, bare, device, calls=EVERY, rounds=max(5, rounds // 15))
            figures.append(of_ratio(name, pair, None if index else bounds.TRACE_RATIO))
            assert ours.recorder is not None
            ours.recorder.close()
    return figures
