"""docs/porting.md is what the rules say; its example is what the porter makes.

Covers: ci/porting_page.py, xamp.port.explain.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ci_scripts import ROOT, script

from xamp.port.rules import built_in

porting_page = script("porting_page")
PAGE = ROOT / "docs" / "porting.md"


def test_the_page_is_up_to_date() -> None:
    assert porting_page.page() == PAGE.read_text(encoding="utf-8")
    assert porting_page.main(["--check"]) == 0


def test_every_rule_is_on_it() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Rules\n")[2]
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [rule.name for rule in porting_page.in_order(built_in())]


def test_examples_on_it_change_code() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Rules\n")[2]
    found = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert all(re.search(r"^- ", diff, re.MULTILINE) for diff in found)
    assert len(found) == sum(any(map(porting_page.changes_code, rule.examples)) for rule in built_in())


def test_a_stale_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "porting.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("\n### torch-cuda\n", "\n### torch_cuda\n"))
    monkeypatch.setattr(porting_page, "PAGE", stale)
    assert porting_page.main(["--check"]) == 1
    assert "is not what the rules say" in capsys.readouterr().out
    assert porting_page.main([]) == 0
    assert porting_page.main(["--check"]) == 0


def test_the_example_of_the_page_is_what_comes_out() -> None:
    pytest.importorskip("libcst")  # the extra xamp[port]
    from xamp.port.engine import port_text

    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    assert port_text(before).text == after
