"""Writes the table of docs/op-policy.md that says in what the autocast lists of torch's releases differ.

tests/data/releases/make.py records them, once on each release, as policy files. With ``--check`` nothing is written: it
fails where the page is not what they say.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.marked import placed, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "data" / "releases"
PAGE = ROOT / "docs" / "op-policy.md"
COMMAND = ".venv/bin/python ci/releases_page.py"

Saved = Mapping[str, Any]


def recorded(folder: pathlib.Path = FOLDER) -> dict[str, list[tuple[str, Saved]]]:
    """By device, pairs of a release and its policy file, the oldest release first."""
    found: dict[str, list[tuple[str, Saved]]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: [int(n) for n in path.stem.split("-")[0].split(".")]):
        release, _, device = path.stem.partition("-")
        found.setdefault(device, []).append((release, json.loads(path.read_text(encoding="utf-8"))))
    return found


def rows(files: Sequence[tuple[str, Saved]], device: str) -> Iterator[list[str]]:
    """For each release the rows of the table that its list lacks, and what not all releases have besides."""
    rules = {row["overload"] for _, saved in files for row in saved["rows"] if row["registered"]}
    common = set.intersection(*(set(saved["device_only"]) for _, saved in files))
    for release, saved in files:
        lacks = rules - {row["overload"] for row in saved["rows"] if row["registered"]}
        besides = set(saved["device_only"]) - common
        yield [release, f"`{device}`", listed(lacks), listed(besides)]


def listed(names: set[str]) -> str:
    """Names for a cell of the table."""
    return " ".join(f"`{name}`" for name in sorted(names))


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    lines = [line for device, files in sorted(recorded().items()) for line in rows(files, device)]
    body = table(("torch", "device", "its list lacks", "and has, as not all releases have"), lines)
    page = PAGE.read_text(encoding="utf-8")
    made = placed(page, "releases", body, "ci/releases_page.py")
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        print(f"docs/{PAGE.name} is not what {FOLDER.relative_to(ROOT)} says. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
