"""The table of docs/validated.md is what the result files say, and takes no file that may not be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import script

from ci import validated_page

performance_page = script("performance_page")
HEAD = "device\ttorch\tdate\tcommand\tresult"


def run(**changed: Any) -> dict[str, Any]:
    versions = {"torch": "2.11.0", "driver": "580"}
    about = {"device": "A Card", "type": "npu", "devices": 1, "cores": 16, "system": "Linux x86_64"}
    stages = [
        {"name": "device", "what": "its tests", "outcome": "failed", "reason": "2 failed", "seconds": 300},
        {"name": "facts", "what": "its gaps", "outcome": "left out", "reason": "none | there_", "seconds": 0},
    ]
    counts: list[dict[str, int]] = [{"passed": 4000, "failed": 2}, {}]
    return {
        "schema": 1,
        "rehearsal": False,
        "by": "contributor",
        "when": "2026-11-27T10:00Z",
        "machine": {**about, "python": "3.12.3", "versions": versions, "xamp": "0.1.0"},
        "stages": [{**stage, "counts": count} for stage, count in zip(stages, counts, strict=True)],
        "failures": [],
        **changed,
    }


def suite(device: str, how: str, when: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "xamp": "0.1.0",
        "python": "3.11.7",
        "run": {"device": device, "how": how, "when": f"{when}T04:10Z", "by": "project"},
        "lanes": [{"name": "A Device", "versions": {"torch": "2.13.0+cpu"}}],
        "clauses": [],
        "tiers": {"probe": {"passed": 31, "known gap": 1, "not declared": 4}},
        "results": [],
    }


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders of results, and a page without rows."""
    for name in ("RESULTS", "GPU"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(validated_page, name, tmp_path / name)
    monkeypatch.setattr(validated_page, "PAGE", tmp_path / "validated.md")
    lines(tmp_path)
    marks = "<!-- seen: made by ci/validated_page.py -->\nold\n<!-- end of seen -->\n"
    (tmp_path / "validated.md").write_text(f"# By hand\n\n{marks}The rest.\n", encoding="utf-8")
    return tmp_path


def lines(folder: Path, *rows: tuple[str, ...]) -> None:
    text = "".join(f"{line}\n" for line in (HEAD, *("\t".join(row) for row in rows)))
    (folder / "RESULTS" / "seen.tsv").write_text(text, encoding="utf-8")


def written(path: Path, found: Any) -> Path:
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def test_the_page_is_up_to_date() -> None:
    assert validated_page.main(["--check"]) == 0


def test_each_kind_of_result_has_its_rows(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(folders, ("CPU", "2.13.0", "by 2026-11-22", "`a | b`", "right"))
    written(folders / "RESULTS" / "cpu.json", suite("cpu", "host", "2026-11-23"))
    written(folders / "RESULTS" / "npu.json", suite("ascend-910a", "emulated", "2026-11-23"))
    written(folders / "GPU" / "one.json", run())
    assert validated_page.main(["--check"]) == 1
    assert "Run: .venv/bin/python ci/validated_page.py" in capsys.readouterr().err
    assert validated_page.main([]) == validated_page.main(["--check"]) == 0
    text = (folders / "validated.md").read_text(encoding="utf-8")
    assert text.startswith("# By hand\n\n<!-- seen: ")
    assert text.endswith("\n<!-- end of seen -->\nThe rest.\n")
    told = ", contributed ([file](gpu/one.json))"
    assert [line for line in text.splitlines() if line.startswith("| ")] == [
        "| device | torch | date | command | result |",
        f"| A Card | 2.11.0 | 2026-11-27 | `ci/gpu.sh device` | 4,000 passed, **2 failed**{told} |",
        f"| A Card | 2.11.0 | 2026-11-27 | `ci/gpu.sh facts` | **left out: none \\| there\\_**{told} |",
        "| CPU | 2.13.0 | by 2026-11-22 | `a \\| b` | right |",
        "| CPU | 2.13.0 | 2026-11-23 | `xamp conformance` | 31 passed, 1 known gap |",
        "| A Device | 2.13.0 | 2026-11-23 | `xamp conformance` | 31 passed, 1 known gap |",
    ]


def test_the_newest_run_is_shown(folders: Path) -> None:
    written(folders / "RESULTS" / "cpu.json", suite("cpu", "host", "2026-11-23"))
    lines(folders, ("CPU", "2.13.0", "by 2026-11-22", "`xamp conformance`", "older"))
    assert [row.result for row in validated_page.rows()] == ["31 passed, 1 known gap"]
    lines(folders, ("CPU", "2.13.0+cpu", "2026-11-24", "`xamp conformance`", "newer"))
    assert [row.result for row in validated_page.rows()] == ["newer"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ("CPU", "2.13.0", "2026-11-24", "right"),
            "line 2: five texts with tabs between them are needed: device torch",
        ),
        (("CPU", "2.13.0", "2026-11-24", "`a`", ""), "five texts"),
        (("CPU", "2.13.0", "yesterday", "`a`", "right"), "'yesterday' is no date such as 2026-11-27"),
        (("CPU", "2.13.0", "2026-11-24", "`/home/someone/a`", "right"), "names a path or a host, '/home/someone/a'"),
    ],
)
def test_a_wrong_line(line: tuple[str, ...], message: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(folders, line)
    assert validated_page.main([]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (run(rehearsal=True), "is of a rehearsal"),
        (run(schema=2), "is no result of `ci/gpu.sh` with schema 1"),
        ([], "is no result"),
        (run(facts={"where": "/home/someone/work/file"}), "'/home/someone/work/file', which a published result"),
        (run(doctor={"on": ["box.internal"]}), "'box.internal'"),
    ],
)
def test_what_may_not_be_shown(found: Any, message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "one.json", found)
    with pytest.raises(validated_page.PageError, match=r"one\.json") as caught:
        validated_page.card(file)
    assert message in str(caught.value)


def test_its_benchmarks_are_on_the_page_of_performance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"device": "A Card", "type": "npu", "cores": 16, "threads": 1, "system": "Linux", "quick": False}
    about |= {"versions": {"torch": "2.11.0"}, "date": "2026-11-27", "load": 0.1, "load at the end": 1.0}
    figure = {"case": "SGD, 1", "value": 0.75, "unit": "ratio", "bound": None, "detail": "", "spread": None}
    benchmarks = {"machine": about, "found": {"step": [{**figure, "missed": False}]}}
    written(tmp_path / "one.json", run(benchmarks=benchmarks))
    written(tmp_path / "two.json", run())
    monkeypatch.setattr(performance_page, "CARDS", tmp_path)
    text = performance_page.page(performance_page.read())
    assert text.index("## A Card") < text.index("## AMD EPYC")
    assert "2026-11-27; npu, 16 cores of which 1 used" in text
    assert "There are no figures of a GPU" not in text
