"""Draws the ratios that the benchmarks of a log have found: ``python -m ci.gpu.pictures LOG PNG``."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import picture
from benchmarks.report import Figure
from ci.gpu.log import Log
from ci.gpu.result import MEASURED

__all__ = ["main"]


def main(log: str, png: str) -> int:
    """Draw it."""
    steps = [step for stage in MEASURED for step in Log(Path(log)).of(stage).steps.values()]
    parts = [step["data"] for step in steps if step["data"]]
    found = {name: list(map(_figure, figures)) for part in parts for name, figures in part["found"].items()}
    if not parts or not picture.draw(found, _title(parts[0]["machine"]), Path(png)):
        print("the benchmarks have no ratios yet")
        return 1
    print(f"{Path(png).name} is drawn")
    return 0


def _title(about: dict[str, object]) -> str:
    versions = about["versions"]
    assert isinstance(versions, dict)
    return f"{about['device']}, torch {versions['torch']}, {about['date']}"


def _figure(record: dict[str, object]) -> Figure:
    return Figure(**{key: value for key, value in record.items() if key != "missed"})  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
