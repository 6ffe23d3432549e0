"""What the report counts, and how it says it.

Covers: xamp.run.report.
"""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from xamp.run.report import Report


def test_rows_are_counted_with_their_first_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report("cpu")
    code = compile(
        "\nreport.note('redirected', 'a', 'b')\nreport.note('redirected', 'a', 'b')\n", str(tmp_path / "t.py"), "exec"
    )
    exec(code, {"report": report})
    assert [(row.what, row.port, row.count, row.first) for row in report.rows()] == [("a", "b", 2, "t.py:2")]
    linecache.clearcache()


def test_rows_of_children_are_added(tmp_path: Path) -> None:
    parent, child = Report("cpu", str(tmp_path)), Report("cpu", str(tmp_path))
    for report, times in ((parent, 1), (child, 3)):
        for _ in range(times):
            report.note("redirected", "a")
    child.note("told", "b")
    child.leave()
    parent.collect()
    assert {row.what: row.count for row in parent.rows()} == {"a": 4, "b": 1}


def test_the_text_has_a_heading_for_each_kind() -> None:
    report = Report("npu")
    assert report.text() == ""
    report.note("refused", "torch.cuda.graph()", "take it out")
    report.note("redirected", "x" * 60, "y")
    lines = report.text().splitlines()
    assert lines[0] == "xamp run: redirected to npu, as a list of what to port"
    assert lines[1].startswith("        1  " + "x" * 60)
    assert lines[1].endswith("-> y")
    assert lines[2] == "xamp run: refused, because nothing could answer"
