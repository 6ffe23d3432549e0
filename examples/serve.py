"""Half-precision inference as a server calls it: cast once at the start, then a function of plain lists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from options import read_options
from torch import nn

import xamp

Answer = Callable[[list[list[float]]], list[int]]


def make_answer(model: nn.Module, level: str) -> Answer:
    """Cast ``model`` once, and return the function that answers requests.

    Args:
        model: a trained model, in fp32, from features to logits.
        level: O5 keeps the weights in bf16, O3 in fp16; O4 and O1 cast per operator.
    """
    model = xamp.initialize(
        model.to(xamp.device()).eval(), level=level, master_weights=None if level[1] in "014" else False
    )

    def answer(rows: list[list[float]]) -> list[int]:
        with torch.inference_mode():
            logits = model(torch.tensor(rows, device=xamp.device()))
        classes: list[int] = logits.argmax(1).tolist()
        return classes

    return answer


def main(words: list[str] | None = None) -> float:
    """Serve some requests, and return the share of answers that are those of fp32."""
    options = read_options(__doc__, 50, words)
    level = "O5" if options.level == "O1" else options.level
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    requests = torch.randn(options.steps, 8, 16)
    wanted = [model(rows).argmax(1).tolist() for rows in requests]
    answer = make_answer(model, level)
    given = [answer(rows.tolist()) for rows in requests]
    same = sum(a == b for one, two in zip(wanted, given, strict=True) for a, b in zip(one, two, strict=True))
    print(f"{same} of {8 * options.steps} answers at {level} are those of fp32")
    return float(same / (8 * options.steps))


if __name__ == "__main__":
    main()
