"""ci/devices.toml: what its rows must be, what the pipeline makes of them, and that pages have them.

Covers: ci/devices.py, ci/devices.toml.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import measuring
import pytest
from ci_scripts import ROOT
from forked_python import python
from gathering import cases

from ci import devices
from ci.devices import DATA, DevicesError
from xamp.registry.find_torch import MINIMUM_TORCH, NEWEST_TESTED, as_text, numbers

TWIN = """
[[device]]
name = "twin"
how = "host"
runner = ["somewhere"]
torch = ["2.7.1", "2.13.0"]
note = "a row more"
title = "the CPU again"\nrequire = ["O1"]\nneeds = "nothing"\ndevice = "cpu"
"""


def with_rows(folder: Path, *rows: str) -> Path:
    """The data file, with more rows."""
    path = folder / "devices.toml"
    path.write_text("\n".join([DATA.read_text(encoding="utf-8"), *rows]), encoding="utf-8")
    return path


def call(*words: str, data: Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of ci/, with this Python as it is."""
    kept = {name: value for name, value in measuring.without(os.environ).items() if not name.startswith("XAMP_")}
    environment = {**kept, "XAMP_DEVICES": str(data), "XAMP_NO_VENV": "1", "PYTHON": python(), **variables}
    command = [*([sys.executable] if words[0].endswith(".py") else []), str(ROOT / "ci" / words[0]), *words[1:]]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


def jobs_of(data: Path = DATA, /, **variables: str) -> list[tuple[str, ...]]:
    found = devices.plan(data, variables)
    return [(job["name"], job["python"], job["torch"], *job["runner"]) for job in found["devices"]]


def names(**variables: str) -> list[str]:
    return list(dict.fromkeys(job[0] for job in jobs_of(**variables)))


def test_the_releases_and_pythons_are_those_that_xamp_names() -> None:
    data = devices.load()
    assert data.whole[0].torch == as_text(MINIMUM_TORCH)
    assert (numbers(data.whole[-1].torch) or ())[:2] == NEWEST_TESTED
    assert f"\ntorch=={data.usual.torch}\n" in devices.PINS.read_text(encoding="utf-8")
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    taken = re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert {taken[0]} <= {release.python for release in data.releases} <= set(taken)
    assert f"python_requires = >={taken[0]}\n" in setup
    pages = ("README.md", "README.zh-CN.md", "docs/start.md", "docs/zh/start.md")
    assert [page for page in pages if f"Python {taken[0]} " not in (ROOT / page).read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/ci.md"])
def test_pages_have_every_row(page: str) -> None:
    text, data = (ROOT / page).read_text(encoding="utf-8"), devices.load()
    with cases() as case:
        for row in data.devices:
            with case(row.name):
                (line,) = re.findall(rf"^\|.*`{row.name}` \|.*$", text, re.MULTILINE)
                if page == "docs/ci.md":
                    assert line.endswith(f"| {row.needs} |")
                    continue
                tested = [f"{torch} ({data.python_of(torch)})" for torch in row.torch]
                assert re.findall(r"\d+\.\d+\.\d+ \([^)]*\)", line.replace("(Python ", "(")) == tested
                assert page == "README.zh-CN.md" or line.endswith(f"| {row.note} |")
        for job in data.jobs if page == "docs/ci.md" else ():
            with case(job.name):
                assert job.name.startswith("versions-") or f"| `{job.name}` | {job.title} |" in text


def test_pins_beside_a_release(tmp_path: Path) -> None:
    pins = tmp_path / "ci.txt"
    pins.write_text("# what CI installs\ntorch==2.13.0\n\nnumpy==2; python_version > '3'\nsetuptools==84\n")
    numpy = "# what CI installs\n\nnumpy==2; python_version > '3'\n"
    assert devices.pins("2.13.0", constraints=pins) == f"torch==2.13.0\n{numpy}setuptools==84\n"
    assert devices.pins("2.11.0", constraints=pins) == f"torch==2.11.0\nsetuptools==81.0.0\n{numpy}"
    assert call("devices.py", "pins", "2.8.0", data=DATA, cwd=tmp_path).stdout == devices.pins("2.8.0")


WRONG = {
    'name = "twin"': ('name = "cpu"', "each row has one of its own"),
    'how = "host"': ('how = "guess"\n', "how is one of host, emulated, third-party, hardware"),
    '["somewhere"]': ("[]", "runner must be a list of labels"),
    '["2.7.1", "2.13.0"]': ('["2.7.0"]', "torch = '2.7.0': it must be one that has a row"),
    "[[device]]": ("[[devise]]", "devise is no table of it"),
    'note = "a row more"': ("host = 1", "unexpected keyword argument 'host'"),
}


def test_a_wrong_row(tmp_path: Path) -> None:
    for old, (new, text) in WRONG.items():
        with pytest.raises(DevicesError, match=text):
            devices.load(with_rows(tmp_path, TWIN.replace(old, new, 1)))


def test_hardware_gets_a_job_only_where_it_is_there(tmp_path: Path) -> None:
    usual = ["cpu", "ascend-910b2", "ascend-910a", "abacus", "standin"]
    assert names() == names(XAMP_HARDWARE="npu", GITHUB_EVENT_NAME="pull_request_target") == usual
    assert names(XAMP_HARDWARE="npu, cuda") == [*usual, "cuda", "npu"]
    data = with_rows(tmp_path, TWIN)
    data.write_text(data.read_text(encoding="utf-8").replace("ready = false", "ready = true", 1), encoding="utf-8")
    twins = [("twin", "3.10", "2.7.1", "somewhere"), ("twin", "3.11", "2.13.0", "somewhere")]
    assert (jobs_of(data)[-3:-1], jobs_of(data)[-1][0]) == (twins, "cuda")
    assert jobs_of(data, GITHUB_EVENT_NAME="pull_request") == jobs_of(data)[:-1]


def test_what_takes_long_is_not_run_for_a_commit() -> None:
    def jobs(event: str) -> set[str]:
        return {job["name"] for job in devices.plan(DATA, {"GITHUB_EVENT_NAME": event})["jobs"]}

    nightly = {row.name for row in devices.load().jobs if row.nightly}
    assert {"coverage", "mutants", "libraries", "emulated-910a"} <= nightly
    assert jobs("schedule") - jobs("push") == nightly
    assert jobs("schedule") == jobs("workflow_dispatch") == jobs("")
    assert jobs("push") == jobs("pull_request") >= {"lint", "quick", "slow", "wheel"}


def test_what_another_project_asks_for() -> None:
    asked = {"XAMP_ONLY": "ascend-910a cuda cpu", "XAMP_RUNNERS": '{"cuda": ["gpu"]}'}
    usual, hardware, ends = devices.load().usual.torch, ("cuda", "", "", "gpu"), "ubuntu-latest"
    assert jobs_of(**asked) == [("ascend-910a", "3.11", usual, ends), hardware, ("cpu", "3.11", usual, ends)]
    two = [hardware, ("cpu", "3.10", "2.7.1", ends), ("cpu", "3.11", "2.99.0", ends)]
    assert jobs_of(**asked, XAMP_TORCH="2.7.1 2.99.0")[2:] == two
    assert jobs_of(**asked, XAMP_PYTHON="3.12", XAMP_TORCH="2.7.1")[-1] == ("cpu", "3.12", "2.7.1", ends)
    wrong = [{"XAMP_ONLY": "gpu"}, {"XAMP_HARDWARE": "cpu"}]
    wrong += [{**asked, "XAMP_RUNNERS": each} for each in ("{", "[]", '{"gpu": ["x"]}', '{"cuda": "x"}')]
    for variables in wrong:
        with pytest.raises(DevicesError, match=r"there are c|it must be JSON, labels by name of a row"):
            jobs_of(**variables)


def test_the_pipeline_reads_it(tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = call("devices.py", "matrix", "--github", data=DATA, cwd=tmp_path, GITHUB_OUTPUT=str(output))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
    assert {name: json.loads(rows) for name, rows in found.items()} == devices.plan(DATA, {})
    assert call("devices.py", "matrix", "--github", data=DATA, cwd=tmp_path, GITHUB_OUTPUT="").returncode == 2


def test_the_suite_runs_on_a_row_and_leaves_its_result(tmp_path: Path) -> None:
    data = with_rows(tmp_path, TWIN, TWIN.replace("twin", "nowhere").replace('"cpu"', '"abroad"'))
    done = call("device.sh", "twin", "--clause", "probe.product", data=data, cwd=tmp_path, XAMP_BY="project")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["ok"], found["lanes"][0]["required"]) == (True, ["O1"])
    assert found["run"] == {"device": "twin", "how": "host", "by": "project", "when": found["run"]["when"]}
    stale = path.rename(path.with_name(path.name.replace("twin", "nowhere")))
    done = call("device.sh", "nowhere", data=data, cwd=tmp_path)
    assert (done.returncode, stale.exists()) == (3, False)
    assert "nowhere: the suite did not run, see above.\nIt needs: nothing." in done.stderr


def test_every_one_is_run_and_one_that_fails_is_told(tmp_path: Path) -> None:
    job = '[[job]]\nname = "{}"\ntitle = "a job"\nrunner = ["somewhere"]\nrun = "ci/{}.sh"\n'
    data = with_rows(tmp_path, job.format("fine", "npu_cache"), job.format("broken", "release"))
    done = call("matrix.sh", "broken", "fine", data=data, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["broken failed, exit code 1", "fine passed"]
    for script in ("device.sh", "matrix.sh"):
        done = call(script, "gpu", data=data, cwd=tmp_path)
        assert done.returncode == 2
        assert "'gpu' is no device or job of devices.toml: there are cpu, ascend-910b2" in done.stderr
