"""Several losses as in detection: whether there is a square, and where. Each loss has a scale of its own."""

from __future__ import annotations

import torch
from options import read_options
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

import xamp

SIZE = 16


class Detector(nn.Module):
    """Images to a logit (is there a square?) and a box (its centre and width, in parts of the image)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.there = nn.Linear(32 * (SIZE // 4) ** 2, 1)
        self.box = nn.Linear(32 * (SIZE // 4) ** 2, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of shape (n,) and boxes of shape (n, 3)."""
        x = self.body(images)
        return self.there(x).squeeze(1), self.box(x)


def batch(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Noise with a bright square in half of the images; whether there is one, and where."""
    images, boxes = torch.rand(count, 1, SIZE, SIZE) * 0.3, torch.zeros(count, 3)
    there = torch.rand(count) < 0.5
    for index in range(count):
        width = int(torch.randint(3, 7, ()))
        x, y = torch.randint(SIZE - width, (2,)).tolist()
        if there[index]:
            images[index, 0, y : y + width, x : x + width] = 1.0
        boxes[index] = torch.tensor([x + width / 2, y + width / 2, width]) / SIZE
    return images.to(device), there.to(device), boxes.to(device)


def main(words: list[str] | None = None) -> float:
    """Train, print the mean error of the boxes, and return it."""
    options = read_options(__doc__, 150, words)
    device = xamp.device()
    model = Detector().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # The heads for boxes give coordinates, whose digits count: they stay fp32.
    model, optimizer = xamp.initialize(model, optimizer, level=options.level, num_losses=2, keep_fp32=["box"])
    for _ in range(options.steps):
        images, there, boxes = batch(32, device)
        optimizer.zero_grad()
        logits, found = model(images)
        loss = binary_cross_entropy_with_logits(logits, there.float())
        with xamp.scale_loss(loss, optimizer, loss_id=0) as scaled:
            scaled.backward(retain_graph=True)
        of_boxes = (smooth_l1_loss(found, boxes, reduction="none").mean(1) * there).sum() / there.sum().clamp(min=1)
        with xamp.scale_loss(of_boxes, optimizer, loss_id=1) as scaled:
            scaled.backward()
        optimizer.step()
    error = float(((found.detach() - boxes).abs().mean(1) * there).sum() / there.sum().clamp(min=1))
    print(f"mean error of boxes {error:.3f} of the image, scales {[xamp.loss_scale(optimizer, i) for i in (0, 1)]}")
    return error


if __name__ == "__main__":
    main()
