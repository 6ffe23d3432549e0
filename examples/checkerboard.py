"""Draws a checkerboard: a network from coordinates to brightness, where gradients are small."""

from __future__ import annotations

from demo_tasks import checkerboard
from options import read_options

import xamp


def main(words: list[str] | None = None) -> float:
    """Train, print the error of the picture, and return it."""
    options = read_options(__doc__, 100, words)
    task = checkerboard(12 if options.quick else 32, options.steps, xamp.device())
    model = task.build().to(xamp.device())
    optimizer = task.optimizer(model)
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    for x, y in task.batches:
        optimizer.zero_grad()
        with xamp.scale_loss(task.criterion(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    error = task.evaluate(model)
    print(f"mean squared error {error:.4f}, scale {xamp.loss_scale(optimizer):g}")
    return error


if __name__ == "__main__":
    main()
