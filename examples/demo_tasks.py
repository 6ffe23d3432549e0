"""The demo's tasks: a network that draws a checkerboard, and one that reads handwritten digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

__all__ = ["Task", "checkerboard", "digits"]

TILES = 4
WIDTH = 256
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """One network, its data and its measure of quality.

    Attributes:
        name: the task's name in table and picture.
        metric: what ``evaluate`` returns, ``"loss"`` or ``"accuracy"`` (a fraction of 1).
        build: makes the network, in fp32, on the CPU.
        optimizer: makes the optimizer for a network.
        criterion: the loss from outputs and targets, a scalar.
        batches: inputs and targets of every step, in order, on the device.
        evaluate: measures the quality of a trained network.
    """

    name: str
    metric: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    criterion: Callable[[Tensor, Tensor], Tensor]
    batches: Sequence[tuple[Tensor, Tensor]]
    evaluate: Callable[[nn.Module], float]


def checkerboard(size: int, steps: int, device: torch.device) -> Task:
    """Regression from the coordinates of an image's pixels to their brightness, with 1x1 convolutions only.

    Args:
        size: height and width of the image in pixels.
        steps: how many steps to train; each sees the whole image.
        device: where the data goes.
    """
    line = torch.linspace(-1, 1, size)
    coordinates = torch.stack(torch.meshgrid(line, line, indexing="ij"))[None].to(device)
    tile = torch.arange(size) * TILES // size
    image = ((tile[:, None] + tile) % 2).float()[None, None].to(device)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (2, WIDTH, WIDTH, WIDTH):
            layers += [nn.Conv2d(channels, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(WIDTH, 1, 1))

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():  # still in training mode, because the one batch is the whole image
            return float(nn.functional.mse_loss(model(coordinates), image))

    return Task(
        name="checkerboard",
        metric="loss",
        build=build,
        # Adam's default eps of 1e-8 is 0 in fp16, and O3 keeps everything in fp16.
        optimizer=lambda model: Adam(model.parameters(), lr=3e-3, eps=1e-4),
        criterion=nn.functional.mse_loss,
        batches=[(coordinates, image)] * steps,
        evaluate=evaluate,
    )


def digits(epochs: int, device: torch.device) -> Task:
    """Classification of 1797 handwritten digits of 8x8 pixels; a quarter of them are test images.

    Args:
        epochs: how many times to train on all training images.
        device: where the data goes.
    """
    data = load_digits()
    split = train_test_split(data.images / 16.0, data.target, test_size=0.25, random_state=0, stratify=data.target)
    images, test_images = (torch.tensor(part, dtype=torch.float32, device=device)[:, None] for part in split[:2])
    labels, test_labels = (torch.tensor(part, dtype=torch.int64, device=device) for part in split[2:])
    shuffle = torch.Generator().manual_seed(0)
    order = [part for _ in range(epochs) for part in torch.split(torch.randperm(len(images), generator=shuffle), BATCH)]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float((model(test_images).argmax(1) == test_labels).float().mean())

    return Task(
        name="digits",
        metric="accuracy",
        build=build,
        optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        criterion=nn.functional.cross_entropy,
        batches=[(images[part.to(device)], labels[part.to(device)]) for part in order],
        evaluate=evaluate,
    )
