"""Writes two tables on torch's releases, in docs/op-policy.md.

The first says in what their autocast lists differ, the second what older ones lack and xamp does without.
tests/data/releases/make.py records the lists, once on each release, as policy files; xamp.torch_compat.torch_features
is the table of what lacks where. With ``--check`` nothing is written: it fails where a page is not what they say.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.marked import placed, table
from xamp.torch_compat.torch_features import FEATURES

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "data" / "releases"
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
    """The rows of the table that its list lacks, and what not all releases have besides: a line for alike releases."""
    rules = {row["overload"] for _, saved in files for row in saved["rows"] if row["registered"]}
    common = set.intersection(*(set(saved["device_only"]) for _, saved in files))
    found: dict[tuple[str, str], list[str]] = {}
    for release, saved in files:
        lacks = rules - {row["overload"] for row in saved["rows"] if row["registered"]}
        found.setdefault((listed(lacks), listed(set(saved["device_only"]) - common)), []).append(release)
    for cells, releases in found.items():
        yield [", ".join(releases), f"`{device}`", *cells]


def listed(names: set[str]) -> str:
    """Names for a cell of the table."""
    return " ".join(f"`{name}`" for name in sorted(names))


def tables() -> dict[tuple[str, str], str]:
    """What stands between the marks: by page and name of the mark."""
    lists = [line for device, files in sorted(recorded().items()) for line in rows(files, device)]
    features = [[feature.since, feature.what, feature.without] for feature in FEATURES.values()]
    heads = ("torch", "device", "its list lacks", "and has, as not all releases have")
    return {
        ("op-policy.md", "releases"): table(heads, lists),
        ("op-policy.md", "features"): table(("since torch", "what", "before"), features),
    }


def main(words: Sequence[str]) -> int:
    """Writes the pages, or checks them; returns the exit status."""
    status = 0
    for (name, mark), body in tables().items():
        path = ROOT / "docs" / name
        page = path.read_text(encoding="utf-8")
        made = placed(page, mark, body, "ci/releases_page.py")
        if "--check" not in words:
            path.write_text(made, encoding="utf-8")
        elif made != page:
            print(f"docs/{name} is not what tests/data/releases and the table of features say. Run: {COMMAND}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
