"""A GAN that learns points on a circle: two networks, two optimizers, three losses with a scale each."""

from __future__ import annotations

import torch
from options import read_options
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import xamp


def main(words: list[str] | None = None) -> float:
    """Train, print how far the made points are from the circle, and return it."""
    options = read_options(__doc__, 400, words)
    device = xamp.device()
    generator: nn.Module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    critic: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    (generator, critic), (opt_g, opt_c) = xamp.initialize(
        [generator, critic], [opt_g, opt_c], level=options.level, num_losses=3
    )
    ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)
    for _ in range(options.steps):
        angle = torch.rand(128, 1, device=device) * 6.2832
        real = torch.cat([angle.sin(), angle.cos()], 1)
        fake = generator(torch.randn(128, 4, device=device))
        opt_c.zero_grad()
        for index, (points, target) in enumerate(((real, ones), (fake.detach(), zeros))):
            loss = binary_cross_entropy_with_logits(critic(points), target)
            with xamp.scale_loss(loss, opt_c, loss_id=index) as scaled:
                scaled.backward()
        opt_c.step()
        opt_g.zero_grad()
        with xamp.scale_loss(binary_cross_entropy_with_logits(critic(fake), ones), opt_g, loss_id=2) as scaled:
            scaled.backward()
        opt_g.step()
    with torch.no_grad():
        made = generator(torch.randn(512, 4, device=device))
    away = float((made.norm(dim=1) - 1).abs().mean())
    print(f"mean distance from the circle {away:.3f}")
    return away


if __name__ == "__main__":
    main()
