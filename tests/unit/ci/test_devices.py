"""ci/devices.toml: what its rows must be, and that one more row appears wherever devices are named."""

from __future__ import annotations

import configparser
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import measuring
import pytest
from ci_scripts import ROOT
from forked_python import python
from gathering import cases

from ci import devices, devices_matrix, devices_page
from ci.devices_data import DevicesError, RowError
from xamp.registry.find_torch import MINIMUM_TORCH, NEWEST_TESTED, as_text, numbers

TWIN = """
[[device]]
name = "twin"
title = "the CPU again"
how = "host"
runner = ["somewhere"]
torch = ["2.7.1", "2.13.0"]
require = ["O1"]
needs = "nothing"
note = "a row more"
device = "cpu"
"""
NOWHERE = TWIN.replace("twin", "nowhere").replace('device = "cpu"', 'device = "abroad"')
JOBS = """
[[job]]
name = "fine"
title = "ends well"
runner = ["somewhere"]
torch = "2.7.1"
run = "ci/npu_cache.sh"

[[job]]
name = "broken"
title = "fails"
runner = ["somewhere"]
run = "ci/release.sh"
"""


def with_rows(folder: Path, *rows: str) -> Path:
    """The data file, with more rows."""
    path = folder / "devices.toml"
    path.write_text("\n".join([devices.DATA.read_text(encoding="utf-8"), *rows]), encoding="utf-8")
    return path


def call(*words: str, data: Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of ci/, with this Python as it is."""
    kept = {name: value for name, value in measuring.without(os.environ).items() if not name.startswith("XAMP_")}
    environment = {**kept, "XAMP_DEVICES": str(data), "XAMP_NO_VENV": "1", "PYTHON": python(), **variables}
    start = [sys.executable] if words[0].endswith(".py") else []
    command = [*start, str(ROOT / "ci" / words[0]), *words[1:]]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


def jobs_of(data: Path, **variables: str) -> list[dict[str, Any]]:
    return devices_matrix.plan(data, variables)["devices"]


def test_the_rows_that_are_there() -> None:
    rows = {row.name: row for row in devices.read()}
    assert [row.how for row in rows.values()].count("emulated") == 2
    assert {"cpu", "ascend-910b2", "ascend-910a", "abacus", "cuda", "rocm", "npu"} <= set(rows)
    assert {"lint", "mutants", "libraries"} <= {row.name for row in devices.read_jobs()}
    assert rows["rocm"].type == "cuda"
    assert rows["cpu"].type == "cpu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows["cpu"].name = "x"  # type: ignore[misc]


def test_each_row_has_the_python_of_its_releases(tmp_path: Path) -> None:
    data = devices.load(with_rows(tmp_path, TWIN, JOBS))
    rows = {row.name: row for row in data.devices}
    assert list(zip(rows["twin"].torch, rows["twin"].python, strict=True)) == [("2.7.1", "3.10"), ("2.13.0", "3.11")]
    pythons = {job.name: job.python for job in data.jobs}
    assert (pythons["fine"], pythons["broken"]) == ("3.10", "3.11")
    assert (rows["cuda"].torch, rows["cuda"].python) == ((), ())


def test_the_releases_are_those_that_xamp_names() -> None:
    data = devices.load()
    assert data.whole[0].torch == as_text(MINIMUM_TORCH)
    assert (numbers(data.whole[-1].torch) or ())[:2] == NEWEST_TESTED
    assert f"\ntorch=={data.usual.torch}\n" in devices.PINS.read_text(encoding="utf-8")
    assert data.usual in data.whole
    assert {release.python for release in data.whole} == {"3.10", "3.11", "3.12", "3.13"}
    assert {row.python for row in data.jobs if not row.nightly} == {data.usual.python}


def test_the_pythons_are_those_that_the_package_takes() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    taken = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    assert taken == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    tested = {release.python for release in devices.load().releases}
    assert taken[0] in tested
    assert tested <= set(taken)
    assert setup["options"]["python_requires"] == f">={taken[0]}"
    pages = ("README.md", "README.zh-CN.md", "docs/start.md", "docs/zh/start.md")
    assert [page for page in pages if f"Python {taken[0]} " not in (ROOT / page).read_text(encoding="utf-8")] == []


def test_pins_beside_a_release(tmp_path: Path) -> None:
    pins = tmp_path / "ci.txt"
    pins.write_text("# what CI installs\ntorch==2.13.0\n\nnumpy==2; python_version > '3'\nnumpy==1\nsetuptools==84\n")
    numpy = "# what CI installs\n\nnumpy==2; python_version > '3'\nnumpy==1\n"
    assert devices.pins("2.13.0", constraints=pins) == f"torch==2.13.0\n{numpy}setuptools==84\n"
    assert devices.pins("2.16.0.dev1", constraints=pins) == f"torch==2.16.0.dev1\n{numpy}setuptools==84\n"
    assert devices.pins("2.11.0", constraints=pins) == f"torch==2.11.0\nsetuptools==81.0.0\n{numpy}"


def test_releases_are_listed_for_scripts(tmp_path: Path) -> None:
    done = call("devices.py", "releases", data=devices.DATA, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{each.torch} {each.python}" for each in devices.load().whole]
    assert len(done.stdout.splitlines()) == 5
    done = call("devices.py", "pins", "2.8.0", data=devices.DATA, cwd=tmp_path)
    assert done.stdout == devices.pins("2.8.0")


def test_what_is_required_can_be_required() -> None:
    from xamp.testing.lane import parse_requirements

    for row in devices.read():
        assert len(parse_requirements(row.require)) == len(row.require), row.name


def test_a_row_more_appears_everywhere(tmp_path: Path) -> None:
    data = with_rows(tmp_path, TWIN)
    twins = [job for job in jobs_of(data) if job["name"] == "twin"]
    assert [(job["python"], job["torch"], job["runner"]) for job in twins] == [
        ("3.10", "2.7.1", ["somewhere"]),
        ("3.11", "2.13.0", ["somewhere"]),
    ]
    assert len({job["result"] for job in jobs_of(data)}) == len(jobs_of(data))

    pages = devices_page.made(devices.read(data), devices.read_jobs(data))
    pages.pop(devices_page.CHINESE)
    for name, text in pages.items():
        assert "the CPU again" in text, name
        assert "the CPU again" not in (ROOT / name).read_text(encoding="utf-8"), name
        assert "twin" in text, name

    assert (
        "twin "
        in call("device.sh", data=data, cwd=tmp_path).stderr
        + call("matrix.sh", "--list", data=data, cwd=tmp_path).stdout
    )
    done = call("devices.py", "pages", "--check", data=data, cwd=tmp_path)
    assert done.returncode == 1
    for name in pages:
        assert f"{name} is not what devices.toml says. Run: python ci/devices.py pages" in done.stdout


def test_the_pages_are_what_the_data_says() -> None:
    assert devices.main(["pages", "--check"]) == 0


def test_pages_are_written_and_keep_the_rest(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in (devices_page.README, devices_page.PAGE, devices_page.CHINESE):
        text = (ROOT / name).read_text(encoding="utf-8")
        taken, left = (r"torch 2\S+ \(.* \| `", " | `") if name == devices_page.CHINESE else (r"^\|.*\n", "")
        (tmp_path / name).write_text(re.sub(taken, left, text, flags=re.MULTILINE), encoding="utf-8")
    assert devices_page.main(devices.DATA, True, tmp_path) == 1
    assert devices_page.main(devices.DATA, False, tmp_path) == 0
    assert devices_page.main(devices.DATA, True, tmp_path) == 0
    for name in (devices_page.BADGE, devices_page.CHINESE):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    (tmp_path / "README.md").write_text("# xamp\n", encoding="utf-8")
    with pytest.raises(DevicesError, match=r"README\.md: the lines <!-- devices: .* are not there"):
        devices_page.main(devices.DATA, False, tmp_path)


def test_the_badge_can_be_read() -> None:
    picture = ElementTree.fromstring(devices_page.badge(devices.read()))
    shapes = picture.findall(".//{*}g/{*}rect")
    assert sum(int(shape.get("width", "")) for shape in shapes) == int(picture.get("width", ""))
    texts = [text.text or "" for text in picture.findall(".//{*}text")]
    assert "emulated: ascend-910b2, ascend-910a" in texts
    assert "no runner: cuda, rocm, npu" in texts
    for shape in shapes:  # contrast with white letters, as WCAG defines it
        parts = [int(shape.get("fill", "")[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        assert 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05) >= 4.5


WRONG = [
    ('name = "twin"', "", "number 9: name is missing"),
    ('name = "twin"', 'name = "the twin"', "small letters, digits, - and ."),
    ('name = "twin"', 'name = "cpu"', "2 rows have this name"),
    ('name = "twin"', 'name = "lint"', "2 rows have this name"),
    ('how = "host"', 'how = "host"\nhost = 1', "host is no key of it; there are name, title, how"),
    ('how = "host"', 'how = "guess"', "how = 'guess': it must be one of host, emulated, third-party, hardware"),
    ('how = "host"', 'how = "emulated"', 'given where how is "emulated"'),
    ('how = "host"', 'how = "third-party"', 'given where how is "third-party"'),
    ('["somewhere"]', "[]", "labels of a runner must stand there"),
    ('["somewhere"]', '"somewhere"', "a list of texts is needed"),
    ('["2.7.1", "2.13.0"]', "[2.7]", "a list of texts is needed"),
    (
        '["2.7.1", "2.13.0"]',
        '["2.7.0"]',
        r"row twin: torch = '2.7.0': it must be a release that has a row",
    ),
    ('["2.7.1", "2.13.0"]', "[]", "only a job on hardware takes what the machine has"),
    ('how = "host"', 'how = "host"\npython = ["3.12"]', "python is no key of it; there are name, title, how"),
    ('["O1"]', '["O1; ls"]', "names, as xamp conformance --require has them"),
    ('"a row more"', '"a | b"', r"no line break, \|, <, > or ` may be in it"),
    ('"a row more"', '"a\\nb"', "no line break"),
    ('"a row more"', "7", "a text is needed"),
    ('device = "cpu"', "count = 2", "1, or more if emulated"),
    ('device = "cpu"', "tests = 1", "bool is needed"),
    ('device = "cpu"', 'build = "metal"', "one of cuda, hip, or left out"),
    ('device = "cpu"', "ready = false", "only hardware can be missing"),
    ('device = "cpu"', 'index = "ftp://x"', "begins with https://"),
    ("[[device]]", "[device]", "Cannot|no TOML"),
    ("[[device]]", "[[devise]]", r"\[\[devise\]\] is no table of it; there are \[\[release\]\], \[\[device\]\], \["),
]
WRONG_RELEASES = [
    ('torch = "2.99.0"', "", "number 7: torch is missing"),
    ('"2.99.0"', '"2.99"', "torch = '2.99': it must be a release, such as 2.13.0"),
    ('"2.99.0"', '"2.15.0"', r"2\.14\.0, 2\.15\.0, 2\.15\.0: each once, from the oldest to the newest"),
    ('"2.99.0"', '"2.9.0"', r"2\.15\.0, 2\.9\.0: each once, from the oldest to the newest"),
    ('"3.13"', '"3.13.1"', "python = '3.13.1': it must be a version, such as 3.11"),
    ('"3.13"', '"3.13"\nusual = true', "2 of 7 rows have usual = true"),
    ('"3.13"', '"3.13"\npins = ["setuptools"]', "pins = 'setuptools': it must be pins, such as setuptools==81"),
    ('"3.13"', '"3.13"\nname = "new"', "name is no key of it; there are torch, python, usual, pins"),
]
RELEASE = '\n[[release]]\ntorch = "2.99.0"\npython = "3.13"\n'


def test_a_wrong_row(tmp_path: Path) -> None:
    with cases() as case:
        for old, new, text in WRONG:
            with case(new or f"no {old}"):
                with pytest.raises(DevicesError, match=text) as caught:
                    devices.read(with_rows(tmp_path, TWIN.replace(old, new, 1)))
                told = str(caught.value)
                assert isinstance(caught.value, RowError) or "TOML" in told or "no table" in told


def test_a_wrong_release(tmp_path: Path) -> None:
    assert devices.load(with_rows(tmp_path, RELEASE)).releases[-1].torch == "2.99.0"
    with cases() as case:
        for old, new, text in WRONG_RELEASES:
            with case(new or f"no {old}"), pytest.raises(RowError, match=text):
                devices.load(with_rows(tmp_path, RELEASE.replace(old, new, 1)))


NO_SCRIPTS = ["rm -rf /", "ci/../x.sh", "python x.py", "xci/lint.sh"]


def test_a_job_runs_a_script_of_ci(tmp_path: Path) -> None:
    with cases() as case:
        for run in NO_SCRIPTS:
            with case(run), pytest.raises(RowError, match="a script in ci/, with its words"):
                devices.read_jobs(with_rows(tmp_path, JOBS.replace("ci/npu_cache.sh", run)))


def test_single_brackets_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    with pytest.raises(DevicesError, match="No such file"):
        devices.read(path)
    path.write_text("[device]\nname = 'x'\n", encoding="utf-8")
    with pytest.raises(RowError, match="with two brackets"):
        devices.read(path)
    path.write_text(RELEASE + "usual = true\n", encoding="utf-8")
    with pytest.raises(DevicesError, match=r"has no row \[\[device\]\]"):
        devices.read(path)


def test_hardware_gets_a_job_only_where_it_is_there() -> None:
    def names(**variables: str) -> list[str]:
        return [str(job["name"]) for job in jobs_of(devices.DATA, **variables)]

    assert names() == [row.name for row in devices.read() for _ in row.torch]
    assert list(dict.fromkeys(names())) == ["cpu", "ascend-910b2", "ascend-910a", "abacus", "standin"]
    assert names(XAMP_HARDWARE="npu, cuda") == [*names(), "cuda", "npu"]
    assert names(XAMP_HARDWARE="npu", GITHUB_EVENT_NAME="pull_request") == names()
    assert names(XAMP_HARDWARE="npu", GITHUB_EVENT_NAME="pull_request_target") == names()
    with pytest.raises(DevicesError, match="'cpu': rows of hardware are cuda, rocm, npu"):
        names(XAMP_HARDWARE="cpu")


def test_hardware_that_is_ready_has_its_job(tmp_path: Path) -> None:
    data = tmp_path / "devices.toml"
    data.write_text(
        devices.DATA.read_text(encoding="utf-8").replace("ready = false", "ready = true", 1), encoding="utf-8"
    )
    assert [job["name"] for job in jobs_of(data)][-1] == "cuda"
    assert "cuda" not in [job["name"] for job in jobs_of(data, GITHUB_EVENT_NAME="pull_request")]


def test_what_takes_long_is_not_run_for_a_commit() -> None:
    def names(event: str) -> set[str]:
        return {job["name"] for job in devices_matrix.plan(devices.DATA, {"GITHUB_EVENT_NAME": event})["jobs"]}

    nightly = {row.name for row in devices.read_jobs() if row.nightly}
    assert {"coverage", "mutants", "libraries", "emulated-910a"} <= nightly
    assert names("schedule") - names("push") == nightly
    assert names("schedule") == names("workflow_dispatch") == names("")
    assert names("push") == names("pull_request") >= {"lint", "quick", "slow", "wheel"}


def test_what_another_project_asks_for() -> None:
    def asked(**variables: str) -> list[tuple[str, str, str]]:
        only = {"XAMP_ONLY": "ascend-910a cuda cpu", "XAMP_RUNNERS": '{"cuda": ["gpu"]}'}
        found = jobs_of(devices.DATA, **only, **variables)
        assert [job["runner"] for job in found if job["name"] != "cpu"][-1] == ["gpu"]
        assert {tuple(job["runner"]) for job in found if job["name"] != "cuda"} == {("ubuntu-latest",)}
        return [(job["name"], job["python"], job["torch"]) for job in found]

    hardware = ("cuda", "", "")
    usual = devices.load().usual
    assert asked() == [("ascend-910a", "3.11", usual.torch), hardware, ("cpu", "3.11", usual.torch)]
    assert asked(XAMP_TORCH="2.7.1 2.99.0") == [
        *(("ascend-910a", python, torch) for torch, python in (("2.7.1", "3.10"), ("2.99.0", "3.11"))),
        hardware,
        *(("cpu", python, torch) for torch, python in (("2.7.1", "3.10"), ("2.99.0", "3.11"))),
    ]
    assert asked(XAMP_PYTHON="3.11,3.12")[-2:] == [("cpu", "3.11", usual.torch), ("cpu", "3.12", usual.torch)]
    assert asked(XAMP_PYTHON="3.12", XAMP_TORCH="2.7.1")[-1:] == [("cpu", "3.12", "2.7.1")]
    with pytest.raises(DevicesError, match="XAMP_ONLY names 'gpu': there are cpu"):
        jobs_of(devices.DATA, XAMP_ONLY="gpu")
    for runners in ("{", "[]", '{"gpu": ["x"]}', '{"cuda": "x"}', '{"cuda": []}'):
        with pytest.raises(DevicesError, match="it must be JSON, labels by name of a row"):
            jobs_of(devices.DATA, XAMP_ONLY="cuda", XAMP_RUNNERS=runners)


def test_the_pipeline_reads_it(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("before=1\n", encoding="utf-8")
    done = call("devices.py", "matrix", "--github", data=devices.DATA, cwd=tmp_path, GITHUB_OUTPUT=str(output))
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
    assert found["before"] == "1"
    assert {job["name"] for job in json.loads(found["jobs"])} >= {"lint", "mutants", "libraries"}
    assert json.loads(found["devices"]) == jobs_of(devices.DATA)
    done = call("devices.py", "matrix", "--github", data=devices.DATA, cwd=tmp_path, GITHUB_OUTPUT="")
    assert done.returncode == 2
    assert "--github is for a step of GitHub Actions" in done.stderr


def test_the_suite_runs_on_a_row_and_leaves_its_result(tmp_path: Path) -> None:
    data = with_rows(tmp_path, TWIN)
    done = call("device.sh", "twin", "--clause", "probe.product", data=data, cwd=tmp_path, XAMP_BY="project")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"twin-python3\.\d+-torch\d+\.\d+\.\d+\.json", path.name)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["ok"]
    assert found["counts"]["passed"] > 0
    assert found["lanes"][0]["required"] == ["O1"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\dZ", found["run"].pop("when"))
    assert found["run"] == {"device": "twin", "how": "host", "by": "project"}


def test_a_device_that_is_not_there_fails(tmp_path: Path) -> None:
    data = with_rows(tmp_path, NOWHERE)
    version = "{}.{}".format(*sys.version_info[:2])
    stale = tmp_path / "results" / f"nowhere-python{version}-torch{installed_torch()}.json"
    stale.parent.mkdir()
    stale.write_text("{}", encoding="utf-8")
    done = call("device.sh", "nowhere", data=data, cwd=tmp_path)
    assert done.returncode == 3
    assert "nowhere: the suite did not run, see above. It needs: nothing." in done.stderr
    assert not stale.exists()


def installed_torch() -> str:
    import torch

    return str(torch.__version__).partition("+")[0]


def test_every_one_is_run_and_one_that_fails_is_told(tmp_path: Path) -> None:
    data = with_rows(tmp_path, JOBS)
    done = call("matrix.sh", "broken", "fine", data=data, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["broken failed, exit code 1", "fine passed"]
    assert call("matrix.sh", "fine", data=data, cwd=tmp_path).returncode == 0


def test_an_unknown_name(tmp_path: Path) -> None:
    for script in ("device.sh", "matrix.sh"):
        done = call(script, "gpu", data=devices.DATA, cwd=tmp_path)
        assert done.returncode == 2
        assert "'gpu' is no device or job of devices.toml: there are cpu, ascend-910b2" in done.stderr
