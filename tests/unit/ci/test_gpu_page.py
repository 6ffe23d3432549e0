"""The part of docs/validated.md on cards is what the files of docs/gpu say, and takes no file that may not be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import script

from ci.gpu import page as gpu_page

performance_page = script("performance_page")


def run(**changed: Any) -> dict[str, Any]:
    versions = {"torch": "2.11.0", "driver": "580"}
    about = {"device": "A Card", "type": "npu", "devices": 1, "cores": 16, "system": "Linux x86_64"}
    stages = [
        {"name": "device", "what": "its tests", "outcome": "failed", "reason": "2 failed", "seconds": 300},
        {"name": "facts", "what": "its gaps", "outcome": "left out", "reason": "none | there", "seconds": 0},
    ]
    counts: list[dict[str, int]] = [{"passed": 4000, "failed": 2}, {}]
    failures = [{"stage": "device", "test": f"tests/test_{i}.py::test_it", "reason": "assert a_b"} for i in range(25)]
    return {
        "schema": 1,
        "rehearsal": False,
        "by": "project",
        "when": "2026-11-27T10:00Z",
        "machine": {**about, "python": "3.12.3", "versions": versions, "xamp": "0.1.0"},
        "stages": [{**stage, "counts": count} for stage, count in zip(stages, counts, strict=True)],
        "failures": failures,
        **changed,
    }


def test_the_page_is_up_to_date() -> None:
    assert gpu_page.main(["--check"]) == 0


def test_what_a_result_says() -> None:
    text = gpu_page.part([run()])
    assert "### A Card\n\n2026-11-27; npu, one device, 16 cores, Linux x86_64; xamp 0.1.0, python 3.12.3" in text
    assert "| device: its tests | **failed** (2 failed): 4000 passed, 2 failed | 300 |" in text
    assert "| facts: its gaps | **left out** (none \\| there) | 0 |" in text
    assert "- `tests/test_19.py::test_it`: assert a\\_b\n- and 5 others, in the file\n" in text
    assert "tests/test_20.py" not in text
    apex = {"beside": "the real Apex", "cases": 9, "equal scales": 7, "both raise": 1, "different": ["x"]}
    apex |= {"bit-equal weights": {"O1 SGD": "3 of 4"}, "worst gap": {"conv O1 SGD": 2e-7}}
    text = gpu_page.part([run(apex=apex)])
    assert "Beside the real Apex, 9 trajectories: scales equal in 7, both raise in 1, 1 differ." in text
    assert "O1 SGD 3 of 4. The largest relative gaps: conv O1 SGD 2.0e-07." in text
    assert gpu_page.part([]) == "No result of `ci/gpu.sh` has come yet.\n"


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
    file = tmp_path / "one.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(gpu_page.PageError, match=r"one\.json") as caught:
        gpu_page.read(file)
    assert message in str(caught.value)


def test_a_stale_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "validated.md"
    page.write_text(f"# By hand\n\n{gpu_page.BEGIN}\nold\n{gpu_page.END}\n\nThe rest.\n", encoding="utf-8")
    monkeypatch.setattr(gpu_page, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_page, "PAGE", page)
    assert gpu_page.main(["--check"]) == 1
    assert "Run: python -m ci.gpu.page" in capsys.readouterr().err
    assert gpu_page.main([]) == gpu_page.main(["--check"]) == 0
    (tmp_path / "one.json").write_text(json.dumps(run()), encoding="utf-8")
    assert gpu_page.main(["--check"]) == 1
    assert gpu_page.main([]) == gpu_page.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# By hand\n\n<!-- cards")
    assert text.endswith("<!-- end of cards -->\n\nThe rest.\n")
    assert "### A Card" in text
    page.write_text("# By hand\n", encoding="utf-8")
    assert gpu_page.main([]) == 2
    assert "lacks the lines" in capsys.readouterr().err


def test_its_benchmarks_are_on_the_page_of_performance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"device": "A Card", "type": "npu", "cores": 16, "threads": 1, "system": "Linux", "quick": False}
    about |= {"versions": {"torch": "2.11.0"}, "date": "2026-11-27", "load": 0.1, "load at the end": 1.0}
    figure = {"case": "SGD, 1", "value": 0.75, "unit": "ratio", "bound": None, "detail": "", "spread": None}
    benchmarks = {"machine": about, "found": {"step": [{**figure, "missed": False}]}}
    (tmp_path / "one.json").write_text(json.dumps(run(benchmarks=benchmarks)), encoding="utf-8")
    (tmp_path / "two.json").write_text(json.dumps(run()), encoding="utf-8")
    monkeypatch.setattr(performance_page, "CARDS", tmp_path)
    text = performance_page.page(performance_page.read())
    assert text.index("## A Card") < text.index("## AMD EPYC")
    assert "2026-11-27; npu, 16 cores of which 1 used" in text
    assert "There are no figures of a GPU" not in text
