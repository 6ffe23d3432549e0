"""The stages of ci/gpu.sh themselves: limits, parts of a rehearsal, clauses that go on, and Apex beside xamp.apex."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ci_scripts import ROOT

from benchmarks.__main__ import BENCHMARKS
from ci.gpu.log import Log
from ci.gpu.machine import ask, file_name
from ci.gpu.result import MEASURED
from ci.gpu.runner import surroundings
from ci.gpu.sides import cases
from ci.gpu.sides_compare import compare
from ci.gpu.stage import FILE
from ci.gpu.table import Plan, stages

ABOUT = {"device": "A Card (80 GB)", "type": "npu", "backend": "npu", "python": "3.12.3"}
PLAN = Plan({**ABOUT, "versions": {"torch": "2.11.0+cu130"}}, 16, Path("a.png"), Path("a.log"))
NAMES = [
    "doctor", "figures", "models", "fp8", "conformance", "device", "apex", "libraries", "benchmarks", "tests",
    "facts", "pictures",
]  # fmt: skip


def test_each_stage_has_less_than_eight_minutes() -> None:
    found = stages(PLAN)
    assert [stage.name for stage in found] == NAMES
    assert all(0 < stage.limit <= 480 for stage in found)
    assert sum(stage.limit for stage in found) <= 38 * 60
    page = (ROOT / "docs" / "card.md").read_text(encoding="utf-8")
    for stage in found:
        assert f"| `{stage.name}` |" in page
        assert any(f"| `{stage.name}` |" in line and f"| {stage.limit:g} s |" in line for line in page.splitlines())


def test_a_rehearsal_has_a_part_of_each_stage() -> None:
    assert [stage.name for stage in stages(dataclasses.replace(PLAN, rehearse=True))] == NAMES
    assert not any(stage.lacks for stage in stages(dataclasses.replace(PLAN, rehearse=True)))
    files = [word for stage in stages(dataclasses.replace(PLAN, rehearse=True)) for word in stage.steps[0].command]
    assert all((ROOT / word).exists() for word in files if word.startswith("tests/"))


def test_benchmarks_are_all_walked_in_a_rehearsal() -> None:
    """Each by a command of its own, so that one whose form does not run stops no other."""

    def walked(plan: Plan) -> list[str]:
        measured = [stage for stage in stages(plan) if stage.name in MEASURED]
        return [
            step.name for stage in measured for step in stage.steps if step.command[2:4] == ["benchmarks", step.name]
        ]

    assert sorted(walked(PLAN)) == sorted(BENCHMARKS)
    assert walked(dataclasses.replace(PLAN, rehearse=True)) == walked(PLAN)
    assert walked(PLAN)[0] == "kernels"


def test_only_tests_that_ask_for_no_device_see_none() -> None:
    (device, tests) = (stage.steps[0].command for stage in stages(PLAN) if stage.name in ("device", "tests"))
    assert "CUDA_VISIBLE_DEVICES=" in tests
    assert "CUDA_VISIBLE_DEVICES=" not in device


def test_apex_is_left_out_where_nothing_names_it() -> None:
    (apex,) = (stage for stage in stages(PLAN) if stage.name == "apex")
    assert apex.lacks == "XAMP_APEX names no folder with the real Apex"
    (apex,) = (stage for stage in stages(dataclasses.replace(PLAN, apex="/opt/apex")) if stage.name == "apex")
    assert not apex.lacks
    assert apex.steps[0].command[-3:] == ["/opt/apex", "npu", FILE]


def test_the_result_is_named_after_the_card() -> None:
    assert file_name(PLAN.about) == "gpu-a-card-80-gb-python3.12-torch2.11.0"
    about = ask("cpu", surroundings(ROOT))
    assert (about["type"], about["backend"], about["devices"]) == ("cpu", "cpu", 1)
    assert about["versions"]["torch"] == torch.__version__


def _clauses(log: Path, *done: str) -> dict[str, str]:
    told = {"XAMP_STAGE_LOG": str(log), "XAMP_STAGE_NAME": "conformance"}
    if done:
        file = log.with_name("done.txt")
        file.write_text("".join(f"{name}\n" for name in done), encoding="utf-8")
        told["XAMP_STAGE_DONE"] = str(file)
    words = [sys.executable, "-m", "ci.gpu.clauses", "cpu", "1", "probe.product", "probe.seed"]
    code = subprocess.run(words, env={**surroundings(ROOT), **told}, cwd=ROOT, check=False).returncode
    assert code == 0
    return {name: test["outcome"] for name, test in Log(log).of("conformance").tests.items()}


def test_clauses_that_passed_are_not_run_again(tmp_path: Path) -> None:
    products = [f"probe.product[{dtype}]" for dtype in ("float32", "float16", "bfloat16")]
    assert _clauses(tmp_path / "a.log") == dict.fromkeys([*products, "probe.seed"], "passed")
    assert _clauses(tmp_path / "b.log", *products[:2], "probe.seed") == {products[2]: "passed"}
    assert _clauses(tmp_path / "c.log", *products, "probe.seed") == {}


def _trajectory(scales: list[float], *weights: float) -> dict[str, Any]:
    return {"scales": [[scale] for scale in scales], "losses": [1.0], "weights": [torch.tensor(weights)]}


def test_two_sides_are_compared() -> None:
    error = {"error": "RuntimeError: no"}
    names = [f"conv, O2, SGD, scale {scale}" for scale in range(6)]
    theirs = [_trajectory([8, 4], 3, 4), _trajectory([8, 4], 3, 4), _trajectory([8, 4], 3, 4), error, error]
    ours = [_trajectory([8, 4], 3, 4), _trajectory([8, 4], 3, 4.5), _trajectory([8, 8], 3, 4), error]
    ours += [_trajectory([8, 4], 3, 4)]
    found = compare(dict(zip(names, theirs, strict=False)), dict(zip(names, ours, strict=False)))
    assert found == {
        "cases": 5,
        "both raise": 1,
        "equal scales": 2,
        "bit-equal weights": {"O2 SGD": "1 of 2"},
        "worst gap": {"conv O2 SGD": 0.1},  # 0.5 of 5
        "different": [
            f"{names[2]}: scales differ first at step 1",
            f"{names[4]}: Apex RuntimeError: no; xamp trains",
        ],
    }


def test_the_cases_are_told_apart() -> None:
    names = list(map(str, cases()))
    assert len(names) == len(set(names)) == 266


def test_both_sides_run(tmp_path: Path) -> None:
    """A folder's apex is the one that is taken; here it is xamp's own, under that name."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("", encoding="utf-8")
    for name in ("amp", "optimizers"):
        text = f"import sys, xamp.apex.{name}\nsys.modules[__name__] = xamp.apex.{name}\n"
        (tmp_path / "apex" / f"{name}.py").write_text(text + "print('taken', file=sys.stderr)\n", encoding="utf-8")
    file = tmp_path / "found.json"
    words = [sys.executable, "-m", "ci.gpu.sides_compare", str(tmp_path), "cpu", str(file), "--steps", "2"]
    environment = {**surroundings(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--sample", "150"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("taken") == 2
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["cases"], found["equal scales"], found["different"]) == (2, 2, [])
    assert found["beside"] == "the real Apex"
    assert os.path.exists(file)
