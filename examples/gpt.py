"""A small GPT, character by character, on a sonnet of Shakespeare (sonnet.txt, in the public domain)."""

from __future__ import annotations

from pathlib import Path

import torch
from options import read_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import xamp

LENGTH = 32


class GPT(nn.Module):
    """Two layers of causal attention over characters."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next character at each place; shapes (n, length) and (n, length, letters)."""
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        # The mask follows the dtype of what it is added to.
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=x.device, dtype=x.dtype)
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def main(words: list[str] | None = None) -> float:
    """Train, print the loss and some text, and return the loss."""
    options = read_options(__doc__, 300, words)
    device = xamp.device()
    text = (Path(__file__).parent / "sonnet.txt").read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = GPT(len(letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    for _ in range(options.steps):
        starts = torch.randint(len(data) - LENGTH - 1, (16,)).tolist()
        batch = torch.stack([data[start : start + LENGTH + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    told = data[:8].to(device)
    with torch.no_grad():
        for _ in range(8 if options.quick else 120):
            told = torch.cat([told, model(told[None, -LENGTH:])[0, -1].argmax()[None]])
    print(f"loss {loss.item():.3f}\n{''.join(letters[index] for index in told.tolist())}")
    return loss.item()


if __name__ == "__main__":
    main()
