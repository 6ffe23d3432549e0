"""Types for words of the command line."""

from __future__ import annotations

import argparse
import re

__all__ = ["as_typed", "named"]

_SPELLINGS = (
    (r"^run\(clauses=\[(.*?)\]\)", lambda found: "--clause " + found[1].replace(",", "")),
    (r"\b(device|backend|require)='([^']*)'", r"--\1 \2"),
    (r"^ledger '([^']*)'", r"--ledger \1"),
    (r", or register it(?: first)?: xamp\.register_backend\(.*?\)(?:, see xamp\.contract)?\.", "."),
    (r", and xamp never moves a model\. Move the model first \(.*?\)\), choose", ". Choose"),
    (r"or leave it to xamp \(.*?\)\.", "or leave --backend out."),
)
"""What stands in errors for a call in Python, and what does for the command line."""


def as_typed(error: Exception) -> str:
    """Return the text of an error in the words of the command line."""
    text = str(error)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text


def named(text: str) -> str:
    """Return ``text``, a name or names with commas between; refuse an empty word.

    ``--device "$DEVICE"`` with a variable that is not set would else mean the default: everything.
    """
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError("is empty: name something, or leave the option out (is a variable not set?)")
    return text
