"""Writes the pickles of managed models beside this file, in a folder of the version that runs: ``python make.py``.

What an earlier version wrote stays; a change of what pickles name adds a folder. Each file holds a model two steps into
its training, what it was given, and what it answered.
"""

from __future__ import annotations

import pathlib
import pickle

import torch
from torch import nn

import xamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def trained(level: str) -> dict[str, object]:
    """A small model after two steps at ``level``, with its input and its output in eval mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    xamp.initialize(model, optimizer, level, verbosity=0)
    x = torch.linspace(-1, 1, 15).reshape(5, 3)
    for _ in range(2):
        optimizer.zero_grad()
        with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(x)
    return {"model": model, "input": x, "output": output}


def main() -> None:
    """Writes one file a level."""
    folder = pathlib.Path(__file__).parent / xamp.__version__
    folder.mkdir(exist_ok=True)
    for level in LEVELS:
        (folder / f"{level}.pkl").write_bytes(pickle.dumps(trained(level), protocol=4))


if __name__ == "__main__":
    main()
