"""Learns to read handwritten digits: a small convolutional network, about 97 % of the test images right."""

from __future__ import annotations

import torch
from demo_tasks import digits
from options import read_options

import xamp


def main(words: list[str] | None = None) -> float:
    """Train, print the share of test images that is right, and return it."""
    options = read_options(__doc__, 300, words)
    task = digits(1 + options.steps // 21, xamp.device())
    model = task.build().to(xamp.device())
    optimizer = task.optimizer(model)
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    for x, y in task.batches[: options.steps]:
        optimizer.zero_grad()
        with xamp.scale_loss(task.criterion(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    right = task.evaluate(model)
    print(f"{right:.1%} of the test images are right")
    assert torch.isfinite(torch.tensor(right))
    return right


if __name__ == "__main__":
    main()
