"""The files of a checkout: what git knows, and what it does not ignore."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["files"]


def files(root: Path, place: str = ".") -> list[str]:
    """Return the files and links below ``place``, by their paths from ``root``; without those that are deleted."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", place]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(root / name)]
