"""A small GPT and the text that it learns, both made here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xamp

__all__ = ["Gpt", "losses"]

WIDTH, HEADS, LENGTH, BATCH = 256, 4, 32, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"
WORDS = ("the", "sea", "was", "calm", "and", "no", "wind", "came", "over", "hills", "of", "sand", "before", "night")


def text(length: int) -> torch.Tensor:
    """Words in an order by chance, in sentences, as numbers of letters."""
    made, found = torch.Generator().manual_seed(11), ""
    while len(found) < length:
        picked = torch.randint(len(WORDS), (3,), generator=made).tolist()
        found += " ".join(WORDS[each] for each in picked) + ".\n"
    return torch.tensor([LETTERS.index(letter) for letter in found[:length]])


class Block(nn.Module):
    """Attention and two layers, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        made: torch.Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return made


class Gpt(nn.Module):
    """Two layers of width 256. There are more letters than the text has: 32."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(32, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        made: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return made


def losses(steps: int, device: str = "cpu", **settings: Any) -> torch.Tensor:
    """Train under ``settings``, from the same weights and on the same text each time; return the loss of each step.

    The text is long and the learning rate falls to zero, so that the last losses are those of the language: neither
    what was learned by heart nor the noise of large steps is compared.
    """
    torch.manual_seed(0)
    model, written = Gpt().to(device), text(200_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    xamp.initialize(model, optimizer, verbosity=0, **settings)
    made, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        starts = torch.randint(len(written) - LENGTH - 1, (BATCH,), generator=made).tolist()
        rows = torch.stack([written[start : start + LENGTH + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)
