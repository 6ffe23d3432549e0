"""The content that a part tests, as one hash: a result says of which content it is true."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ci.tree import files

__all__ = ["hash_of"]


def hash_of(root: Path, places: Sequence[str]) -> str:
    """A hash of all files below some places, of their names and of what is in them.

    Args:
        root: the checkout.
        places: files, and folders with a slash at their end, from the checkout. What git ignores does not count.

    Raises:
        ValueError: one of them is not there.
    """
    found = hashlib.sha256()
    for file in sorted({file for place in places for file in _files(root, place)}):
        found.update(f"{file}\0".encode())
        found.update(hashlib.sha256((root / file).read_bytes()).digest())
    return found.hexdigest()[:16]


def _files(root: Path, place: str) -> list[str]:
    there = [name for name in files(root, place) if (root / name).is_file()]  # a link to a folder has no content
    if not there:
        raise ValueError(f"there is no {place} in the checkout")
    return there
