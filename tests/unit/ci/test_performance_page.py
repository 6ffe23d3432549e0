"""docs/performance.md is what the files of docs/performance say, and says what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import script

performance_page = script("performance_page")
FIGURE = {"case": "SGD, 1", "value": 0.75, "unit": "ratio", "bound": 0.8, "detail": "3 us :   4 us"}


def measured(kind: str = "cpu", *, load: float = 0.1, end: float = 1.1, **changed: Any) -> dict[str, Any]:
    about = {"device": f"a {kind}", "type": kind, "cores": 2, "threads": 1, "system": "Linux x86_64"}
    about |= {"versions": {"torch": "2.13.0"}, "date": "2026-11-23", "load": load, "load at the end": end}
    figure = {**FIGURE, "spread": [0.7, 0.78], "missed": False, **changed}
    return {"machine": {**about, "quick": False}, "found": {"step": [figure]}}


def test_the_page_is_up_to_date() -> None:
    assert performance_page.main(["--check"]) == 0


def test_it_says_that_no_gpu_was_measured() -> None:
    said = "There are no figures of a GPU or an NPU"
    assert said in performance_page.page([measured()])
    assert said in performance_page.page([])
    assert said not in performance_page.page([measured(), measured("npu")])


def test_it_says_that_the_machine_was_busy() -> None:
    assert "Nothing else ran" in performance_page.page([measured()])
    assert "Other work ran on the machine meanwhile: 2.5 processes" in performance_page.page([measured(load=2.5)])
    assert "Other work ran on the machine meanwhile: 1.9 processes" in performance_page.page([measured(end=2.9)])


def test_a_figure_has_its_bound() -> None:
    text = performance_page.page([measured()])
    assert "| SGD | 0.750, bound 0.8 |" in text
    assert "| SGD | 0.750, bound 0.8, **missed** by 1 of 1 |" in performance_page.page([measured(missed=True)])
    assert "2026-11-23; cpu, 2 cores of which 1 used, Linux x86_64; torch 2.13.0." in text


def test_the_figures_that_matter_come_first_with_their_date() -> None:
    text = performance_page.page([measured("npu"), measured()])
    first = text[: text.index("## a npu")]
    assert "| what | against | a npu, 2026-11-23 | a cpu, 2026-11-23 |" in first
    assert "| the `torch.amp` loop by hand | 0.750, bound 0.8 | 0.750, bound 0.8 |" in first
    assert "| whole steps of models | Apex | not measured | not measured |" in first


def test_a_cell_has_the_median_and_the_worst_of_its_cases() -> None:
    machine = measured()
    (figure,) = machine["found"]["step"]
    more = [
        ("SGD, 50", 0.78, False),
        ("SGD, 300", 0.85, True),
        ("SGD, 1, no unscale_", 0.7, False),
        ("apart", 0.9, True),
    ]
    machine["found"]["step"] += [{**figure, "case": case, "value": v, "missed": m} for case, v, m in more]
    text = performance_page.page([machine])
    assert "| case | ratio | no unscale_ |" in text
    assert "| SGD | 0.780; worst 0.850 (300), bound 0.8, **missed** by 1 of 3 | 0.700, bound 0.8 |" in text
    assert "\napart: 0.900, bound 0.8, **missed** by 1 of 1.\n" in text


def test_a_unit_stands_in_the_cell_where_cases_have_several() -> None:
    machine = measured()
    cases = [("MLP: over Fabric", "ratio"), ("MLP: rows a second", "rows/s"), ("MLP: Apex is not there", "")]
    figure = {**FIGURE, "bound": None, "spread": None, "missed": False}
    machine["found"] = {
        "models": [{**figure, "case": case, "unit": unit, "value": bool(unit)} for case, unit in cases],
        "memory": [{**figure, "case": "O2 auto", "unit": "bytes"}],
    }
    text = performance_page.page([machine])
    assert (
        "| case | over Fabric | a second |\n|---|---|---|\n| MLP | 1 | 1 rows/s |\n\nMLP: Apex is not there.\n" in text
    )
    assert "| O2 | 0.750 |" in text


def test_a_stale_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(performance_page, "FOLDER", tmp_path)
    monkeypatch.setattr(performance_page, "PAGE", tmp_path / "performance.md")
    (tmp_path / "one.json").write_text(json.dumps(measured()), encoding="utf-8")
    assert performance_page.main(["--check"]) == 1
    assert "is not what docs/performance/ says" in capsys.readouterr().out
    assert performance_page.main([]) == 0
    assert performance_page.main(["--check"]) == 0
    (tmp_path / "two.json").write_text(json.dumps(measured("npu")), encoding="utf-8")
    assert performance_page.main(["--check"]) == 1
    assert performance_page.main([]) == 0
    text = performance_page.PAGE.read_text(encoding="utf-8")
    assert text.index("## a npu") < text.index("## a cpu")
