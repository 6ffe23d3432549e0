"""The pipeline's files hold no logic: they call scripts of ci/, by fixed versions of actions, and may read only.

Covers: .github/workflows/*.yml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci_scripts import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github" / "actions").glob("*/action.yml"))
FILES = [*WORKFLOWS, *ACTIONS]

_CALL = re.compile(
    r"(python3 |\.xamp/|\"\$ACTION/\.\./\.\./\.\./)?"  # from where
    r"(?P<script>ci/\w+\.(?:sh|py))\"?"
    r"( [-\w]+| \"\$\w+\")*"
)
"""One script, its words, and variables in quotes. No pipe, no second command, nothing that a shell would replace."""


def shown(path: Path) -> str:
    """What a test is called."""
    return path.relative_to(ROOT / ".github").as_posix()


def load(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    file = load(path)
    for job in file.get("jobs", {"": file.get("runs")}).values():
        yield from job["steps"]


def inputs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(path)[True]["workflow_call"]["inputs"]  # YAML 1.1 reads the key `on` as true
    return found


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_each_step_calls_a_script_or_a_fixed_action(path: Path) -> None:
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        if step.get("uses", "").startswith("./"):
            assert (ROOT / step["uses"].removeprefix("./").removeprefix(".xamp/") / "action.yml").is_file()
        elif "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
        else:  # a command of the other project's is handed on as one word
            match = _CALL.fullmatch(step["run"].replace(' -- bash -c "$COMMAND"', ' "$COMMAND"'))
            assert match, step["run"]
            assert os.access(ROOT / match["script"], os.R_OK if match["script"].endswith(".py") else os.X_OK)
            assert set(re.findall(r"\$(\w+)", step["run"])) <= set(step["env"]), step["run"]


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_expressions_only_look_something_up(path: Path) -> None:
    allowed = re.compile(r"(?!secrets\.)(\w+(\.[\w-]+)+|fromJSON\(needs(\.\w+)+\)|!cancelled\(\))")
    for expression in re.findall(r"\$\{\{(.*?)\}\}", path.read_text(encoding="utf-8")):
        assert allowed.fullmatch(expression.strip()), expression


@pytest.mark.parametrize("path", WORKFLOWS, ids=shown)
def test_a_job_may_only_read_and_ends(path: Path) -> None:
    file = load(path)
    assert file["permissions"] == {"contents": "read"}
    for job in file["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] > 0
        assert job["runs-on"] in ("ubuntu-latest", "${{ matrix.runner }}")


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_what_the_matrix_gives_is_what_jobs_take(path: Path) -> None:
    from ci.devices import DATA, plan

    text = path.read_text(encoding="utf-8")
    given = {key for rows in plan(DATA, {}).values() for row in rows for key in row}
    assert set(re.findall(r"matrix\.(\w+)", text)) <= given
    known = inputs(path) if "workflow_call" in text else load(path).get("inputs", {})
    assert set(re.findall(r"\{ inputs\.(\w+)", text)) == set(known)


def test_the_example_of_the_page_fits_the_workflow() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (job,) = blocks[0]["jobs"].values()
    taken = inputs(ROOT / ".github" / "workflows" / "xamp-matrix.yml")
    assert set(job["with"]) <= set(taken)
    assert {name for name, one in taken.items() if one.get("required")} <= set(job["with"])
