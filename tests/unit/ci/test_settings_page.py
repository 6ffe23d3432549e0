"""docs/settings.md is what the code says, and tells of every argument of ``initialize``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT, script

import xamp
from xamp.policy import LEVELS, Request

settings_page = script("settings_page")
PAGE = ROOT / "docs" / "settings.md"


@dataclasses.dataclass(frozen=True)
class Longer(Request):
    shiny: Any = None


def with_argument(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """``initialize`` and ``Request`` have one more, ``shiny``; its docstring has ``text`` at the end of Args."""

    def initialize(shiny: Any = None) -> None: ...

    signature = inspect.signature(xamp.initialize)
    added = inspect.Parameter("shiny", inspect.Parameter.KEYWORD_ONLY, default=None)
    initialize.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    initialize.__doc__ = (inspect.getdoc(xamp.initialize) or "").replace("\n\nReturns:", f"{text}\n\nReturns:")
    monkeypatch.setattr(settings_page.xamp, "initialize", initialize)
    monkeypatch.setattr(settings_page, "Request", Longer)


def test_the_page_is_up_to_date() -> None:
    assert settings_page.page() == PAGE.read_text(encoding="utf-8")
    assert settings_page.main(["--check"]) == 0


def test_every_argument_is_on_it() -> None:
    found = re.findall(r"^\| `(\w+)` \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(found) == set(inspect.signature(xamp.initialize).parameters)
    assert {field.name for field in dataclasses.fields(Request)} <= set(found)


def test_the_defaults_are_the_levels() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Defaults by level")[2].partition("## ")[0]
    lines = [[cell.strip(" `") for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows = {cells[1]: cells[2:-1] for cells in lines}
    assert rows["setting"] == list(LEVELS)
    assert rows["loss_scale"] == ["dynamic" if row.dynamic else f"{row.loss_scale:g}" for row in LEVELS.values()]
    assert rows["dtype"] == [row.dtype or "float32" for row in LEVELS.values()]
    assert rows["master_weights"] == ["yes" if row.master_weights else "no" for row in LEVELS.values()]


def test_a_setting_without_a_meaning_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_argument(monkeypatch, "")
    assert settings_page.main(["--check"]) == 1
    assert "shiny: the docstring of xamp.initialize does not say what it means" in capsys.readouterr().out


def test_a_setting_of_no_known_use_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_argument(monkeypatch, "\n    shiny: whether it shines, or\n        glows; None: the level's.")
    assert settings_page.main(["--check"]) == 1
    assert "shiny: there is no row for it in USE" in capsys.readouterr().out


def test_an_argument_that_is_gone_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(settings_page.USE, "shiny", "never")
    assert settings_page.main(["--check"]) == 1
    assert "shiny: in USE, of ci/settings_page.py, but no argument" in capsys.readouterr().out


def test_a_stale_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings_page, "PAGE", tmp_path / "settings.md")
    assert settings_page.main(["--check"]) == 1
    assert "is not what the code says" in capsys.readouterr().out
    assert settings_page.main([]) == 0
    assert settings_page.main(["--check"]) == 0
    settings_page.PAGE.write_text(settings_page.page().replace("2000", "1000"), encoding="utf-8")
    assert settings_page.main(["--check"]) == 1


def test_meanings_are_read_whole() -> None:
    found = settings_page.read_meanings(
        "X.\n\nArgs:\n    a: one ``b``,\n        two | three.\n    c: four.\n\nReturns:\n    d: e\n"
    )
    assert found == {"a": "one `b`, two / three.", "c": "four."}
