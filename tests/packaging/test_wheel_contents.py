"""ci/wheel_contents.py: what leads nowhere from the page of a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def links(text: str) -> list[str]:
    spec = importlib.util.spec_from_file_location("wheel_contents", ROOT / "ci" / "wheel_contents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.relative_links(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "Name: xamp\n\nsee [Apex](docs/apex.md), [a](<docs/a b.md>) and [home](https://example.org/x)",
            ["docs/apex.md", "docs/a"],
        ),
        ("Name: xamp\n\n![plot](plot.png)\n\n[name]: docs/apex.md\n", ["plot.png", "docs/apex.md"]),
        ('Name: xamp\n\n<img src="plot.png"> <a href=https://example.org>', ["plot.png"]),
        ("Name: xamp\n\n[up](#top) [mail](mailto:a@example.org)", ["#top"]),
        ("Name: xamp\nProject-URL: Source, docs/here\n\n`[a](b)` and\n```\n[c](d)\n```\n", ["docs/here"]),
    ],
)
def test_relative_links_are_found(text: str, found: list[str]) -> None:
    assert links(text) == found


def test_the_description_has_none() -> None:
    assert links("Name: xamp\n\n" + (ROOT / "docs" / "package.md").read_text(encoding="utf-8")) == []
    assert links("Name: xamp\n\n" + (ROOT / "README.md").read_text(encoding="utf-8")) != []
