"""Types for words of the command line."""

from __future__ import annotations

import argparse

__all__ = ["named"]


def named(text: str) -> str:
    """Return ``text``, a name or names with commas between; refuse an empty word.

    ``--device "$DEVICE"`` with a variable that is not set would else mean the default: everything.
    """
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError("is empty: name something, or leave the option out (is a variable not set?)")
    return text
