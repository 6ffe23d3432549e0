"""Fine-tuning in the manner of BERT: an encoder that was trained, a new head, AdamW with a warm-up, clipping.

The task: which of two kinds of token is more frequent in a sentence. The encoder learns tokens first, by filling gaps.
"""

from __future__ import annotations

import torch
from options import read_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import xamp

TOKENS, LENGTH, WIDTH, GAP = 20, 15, 48, 0


class Encoder(nn.Module):
    """Tokens of shape (n, length) to features of shape (n, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the features of each token."""
        features: Tensor = self.layers(self.tokens(text))
        return features


class Classifier(nn.Module):
    """The encoder, a mean over the sentence, and a new head."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of both classes."""
        logits: Tensor = self.head(self.encoder(text).mean(1))
        return logits


def pretrain(encoder: Encoder, steps: int, level: str) -> None:
    """Fill gaps: each sentence repeats one token, of which one is hidden."""
    device = xamp.device()
    model = nn.Sequential(encoder, nn.Linear(WIDTH, TOKENS)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    for _ in range(steps):
        text = torch.randint(1, TOKENS, (32, 1), device=device).repeat(1, LENGTH)
        hidden = text.clone()
        hidden[:, 3] = GAP
        optimizer.zero_grad()
        with xamp.scale_loss(cross_entropy(model(hidden)[:, 3], text[:, 3]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    xamp.session(model).close()  # the encoder is plain fp32 again, and another session may have it


def main(words: list[str] | None = None) -> float:
    """Pre-train, fine-tune, print the share that is right, and return it."""
    options = read_options(__doc__, 150, words)
    device = xamp.device()
    encoder = Encoder()
    pretrain(encoder, options.steps, options.level)
    model = Classifier(encoder).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    for _ in range(options.steps):
        text = torch.randint(1, TOKENS, (32, LENGTH), device=device)
        target = ((text < TOKENS // 2).sum(1) > LENGTH // 2).long()
        optimizer.zero_grad()
        logits = model(text)
        with xamp.scale_loss(cross_entropy(logits, target), optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        schedule.step()
    right = float((logits.argmax(1) == target).float().mean())
    print(f"{right:.1%} of the last batch are right")
    return right


if __name__ == "__main__":
    main()
