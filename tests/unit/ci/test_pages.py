"""Pages and pictures that are kept by hand name what is in the code; where they do not, mend them.

Covers: docs/settings.md, docs/op-policy.md, docs/architecture.svg.
"""

from __future__ import annotations

import re

from ci_scripts import ROOT

from xamp.policy import LEVELS
from xamp.torch_compat.torch_features import FEATURES

DOCS = ROOT / "docs"


def rows(page: str, after: str = "") -> list[list[str]]:
    """The cells of the lines of tables in a page, without backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for line in text[text.index(after) :].splitlines() if "|" in line]
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_defaults_of_settings_are_the_levels() -> None:
    found = {cells[0]: cells[1:] for cells in reversed(rows("docs/settings.md", "## Defaults by level"))}
    assert found["setting"] == list(LEVELS)
    assert found["loss_scale"] == ["dynamic" if row.dynamic else f"{row.loss_scale:g}" for row in LEVELS.values()]
    assert found["dtype"] == [row.dtype or "float32" for row in LEVELS.values()]
    assert found["master_weights"] == ["yes" if row.master_weights else "no" for row in LEVELS.values()]


def test_what_older_releases_lack_is_told() -> None:
    found = rows("docs/op-policy.md", "What older releases lack")
    assert [[each.since, each.what, each.without] for each in FEATURES.values()] == found[2 : 2 + len(FEATURES)]


def test_the_picture_of_the_architecture_has_every_package() -> None:
    text = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    names = [path.name.replace(".py", "") for path in (ROOT / "xamp").iterdir() if not path.name.startswith("__")]
    assert [name for name in names if name != "py.typed" and not re.search(rf">{name}(/|\.py)[:<]", text)] == []
