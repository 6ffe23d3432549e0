"""The options that all examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

__all__ = ["read_options"]


def read_options(about: str | None, steps: int, words: Sequence[str] | None) -> argparse.Namespace:
    """Read ``--level``, ``--steps`` and ``--quick``, and seed torch.

    Args:
        about: the example's docstring.
        steps: how many steps to train by default; ``--quick`` makes it 5.
        words: the arguments; None means those of the process.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--level", default="O1", help="a level of xamp, or auto (O1)")
    parser.add_argument("--steps", type=int, default=steps, help=f"how many steps to train ({steps})")
    parser.add_argument("--quick", action="store_true", help="5 steps, to see that it runs")
    options = parser.parse_args(words)
    if options.quick:
        options.steps = 5
    torch.manual_seed(0)
    return options
