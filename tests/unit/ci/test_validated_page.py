"""The table of docs/validated.md is what the result files say, and takes no file that may not be shown.

Covers: ci/validated_page.py, ci/results.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ci import results, validated_page


def card(**changed: Any) -> dict[str, Any]:
    stage = {"name": "device", "outcome": "failed", "reason": "2 failed", "counts": {"passed": 4000, "failed": 2}}
    left_out = {"name": "facts", "outcome": "left out", "reason": "none | there_", "counts": {}}
    about = {"device": "A Card", "versions": {"torch": "2.11.0"}}
    head = {"schema": 1, "rehearsal": False, "by": "contributor", "when": "2026-11-27T10:00Z"}
    return {**head, "machine": about, "stages": [stage, left_out], **changed}


SUITE = {
    "schema": 1, "xamp": "0.1.0", "python": "3.11.7", "clauses": [],
    "run": {"device": "cpu", "how": "host", "when": "2026-11-23T04:10Z", "by": "project"},
    "lanes": [{"name": "A Device", "versions": {"torch": "2.13.0+cpu"}}],
    "results": [
        {"tier": "probe", "clause": "probe.a", "outcome": "passed", "reason": ""},
        {"tier": "probe", "clause": "probe.b", "outcome": "failed", "reason": "in /home/someone/b.py"},
    ],
}  # fmt: skip


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page without rows, beside folders of results."""
    monkeypatch.setattr(validated_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(validated_page, "GPU", tmp_path / "gpu")
    monkeypatch.setattr(validated_page, "PAGE", tmp_path / "page.md")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "page.md").write_text("<!-- seen: made by ci/validated_page.py -->\n<!-- end of seen -->\nRest.\n")
    (tmp_path / "seen.tsv").write_text("head\nCPU\t2.13.0\tby 2026-11-22\t`a | b`\tright\n")
    return tmp_path / "page.md"


def test_the_page_is_up_to_date() -> None:
    assert validated_page.main(["--check"]) == 0


def test_each_kind_of_result_has_its_rows(page: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "cpu.json").write_text(json.dumps(SUITE))
    assert results.main([str(tmp_path / "made" / "cpu.json")]) == 0
    (tmp_path / "gpu" / "one.json").write_text(json.dumps(card()))
    assert validated_page.main(["--check"]) == 1
    assert validated_page.main([]) == validated_page.main(["--check"]) == 0
    told = ", contributed ([file](gpu/one.json))"
    assert page.read_text().splitlines()[4:-3] == [
        f"| A Card | 2.11.0 | 2026-11-27 | `ci/gpu.sh device` | 4,000 passed, **2 failed**{told} |",
        f"| A Card | 2.11.0 | 2026-11-27 | `ci/gpu.sh facts` | **left out: none \\| there\\_**{told} |",
        "| CPU | 2.13.0 | by 2026-11-22 | `a \\| b` | right |",
        "| CPU | 2.13.0 | 2026-11-23 | `xamp conformance` | 1 passed, 1 failed |",
    ]


def test_what_may_not_be_shown(page: Path, tmp_path: Path) -> None:
    wrong: list[object] = [card(rehearsal=True), card(schema=2), [], card(facts={"where": "/home/someone/file"})]
    for found in wrong:
        (tmp_path / "gpu" / "one.json").write_text(json.dumps(found))
        assert validated_page.main([]) == 2
    (tmp_path / "gpu" / "one.json").unlink()
    for line in ("CPU\t2\t2026-11-24\tright", "CPU\t2\tyesterday\t`a`\tb", "CPU\t2\t2026-11-24\t`/home/a/b`\tc"):
        (tmp_path / "seen.tsv").write_text(f"head\n{line}\n")
        assert validated_page.main([]) == 2
