"""The content that a part tests, as one hash: a result says of which content it is true."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def _files(root: Path, place: str) -> Iterator[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", place]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    there = [file for file in listed.split("\0") if file and (root / file).is_file()]
    if not there:
        raise ValueError(f"there is no {place} in the checkout")
    return iter(there)
