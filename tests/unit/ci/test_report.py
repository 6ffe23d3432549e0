"""ci/report.py: what a page says comes from results, and a result names no host and no path."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gathering import cases

from ci import report, report_page
from ci.devices import read as read_devices
from ci.results import ResultError, kept, newest, read
from xamp.values.version import __version__

FAILED = {
    "tier": "scaling",
    "clause": "scaling.floor",
    "outcome": "failed",
    "reason": "assert <b>1</b> | 2 `x`",
    "text": "",
}


def result(**changes: Any) -> dict[str, Any]:
    """What ci/device.sh writes; ``changes`` go into it by key."""
    made: dict[str, Any] = {
        "schema": 1,
        "ok": False,
        "clauses": [],
        "xamp": __version__,
        "python": "3.11.7",
        "lanes": [{"lane": "cpu", "name": "AMD EPYC", "versions": {"torch": "2.13.0+cpu"}}],
        "results": [
            *({"tier": "probe", "clause": f"probe.{i}", "outcome": "passed", "reason": ""} for i in range(7)),
            {"tier": "probe", "clause": "probe.flag", "outcome": "not declared", "reason": "a flag"},
            {"tier": "scaling", "clause": "scaling.dynamic", "outcome": "passed", "reason": ""},
            FAILED,
            {"tier": "levels", "clause": "levels.O5", "outcome": "known gap", "reason": "issue 1"},
        ],
        "run": {"device": "cpu", "how": "host", "when": "2026-11-23T04:10Z", "by": "project"},
    }
    made.update(copy.deepcopy(changes))
    return made


@pytest.fixture
def page(tmp_path: Path) -> Any:
    def make(*results: dict[str, Any]) -> tuple[str, str]:
        files = []
        for place, one in enumerate(results):
            files.append(tmp_path / f"{place}.json")
            files[-1].write_text(json.dumps(one))
        found = report_page.Report(read_devices(), newest((file.name, read(file)) for file in files))
        return report_page.markdown(found), report_page.html_page(found)

    return make


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip("| "): row[1:] for row in cells}


def test_each_cell_is_counted_from_the_result(page: Any) -> None:
    text, _ = page(result())
    found = rows(text)
    by_tier = dict(zip(found["device"], found["CPU"], strict=True))
    assert by_tier["probe"] == "7"
    assert by_tier["scaling"] == "1 of 2 failed"
    assert by_tier["levels"] == "0, 1 known gap"
    assert by_tier["numerics"] == "not run"
    assert "scaling.floor" in text
    assert "issue 1" in text


def test_what_no_result_backs_is_not_run(page: Any) -> None:
    text, html = page(result())
    for device in read_devices():
        if device.name != "cpu":
            assert set(rows(text)[device.title][:-1]) == {"not run"}
    assert html.count(">not run</td>") == len(read_devices()) - 1
    hardware = [device.title for device in read_devices() if device.how == "hardware"]
    assert f"Not run on hardware: {', '.join(hardware)}." in text
    on_a_card = ran(device="cuda", how="hardware")
    assert f"Not run on hardware: {', '.join(hardware[1:])}." in page(on_a_card)[0]
    for claim in (ran(device="cuda", how="emulated"), {**on_a_card, "results": []}):
        assert f"Not run on hardware: {', '.join(hardware)}." in page(claim)[0]
    assert "Nothing has been run." in page()[0]


def ran(**changes: str) -> dict[str, Any]:
    """A result whose ``run`` says other things."""
    return result(run={"device": "cpu", "how": "host", "when": "2026-11-23T04:10Z", "by": "project", **changes})


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (result(xamp="0.0.9"), "of xamp 0.0.9, older than the release"),
        (ran(by="contributor"), "contributed"),
        (ran(how="emulated"), "emulated"),
        (result(clauses=["probe.*"]), "7 (part)"),
    ],
)
def test_what_a_reader_must_know_stands_beside_the_numbers(page: Any, one: dict[str, Any], told: str) -> None:
    for text, plain in zip(page(one), page(result()), strict=True):
        line, before = (next(each for each in whole.splitlines() if "AMD EPYC" in each) for whole in (text, plain))
        assert told in line
        assert told not in before


def test_the_newest_of_a_machine_counts_and_two_that_differ_are_refused(page: Any) -> None:
    older = result(run={"device": "cpu", "how": "host", "when": "2026-11-20T04:10Z", "by": "project"}, results=[FAILED])
    assert rows(page(older, result())[0])["CPU"] == rows(page(result())[0])["CPU"]
    with pytest.raises(ResultError, match=r"0\.json and 1\.json tell of the same run"):
        page(result(), result(results=[FAILED]))


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_one_file_and_texts_stay_texts(page: Any) -> None:
    evil = {**FAILED, "reason": "<script>alert(1)</script>", "clause": "scaling.<img src=x>", "tier": "<script>"}
    text, html = page(result(results=[evil], xamp="0.0.1<script>"))
    parser = _Texts()
    parser.feed(html)
    assert not {"script", "img", "link"} & parser.tags
    assert not parser.sources
    assert "url(" not in html
    assert "<script>" not in text
    assert "<img" not in re.sub("`[^`]*`", "", text)


NO_RESULTS = [
    ("{", "is no JSON"),
    ("[]", "schema None; this reads 1"),
    (json.dumps(result(schema=2)), "schema 2; this reads 1"),
    (json.dumps({**result(), "run": {}}), "it lacks 'how'|it lacks 'when'"),
    (
        json.dumps(ran(how="dreamt")),
        "dreamt",
    ),
    (json.dumps(ran(when="today")), "today"),
    (json.dumps(ran(by="me")), "'me'"),
    (json.dumps(result(lanes=[])), "no result of"),
    (json.dumps(result(tiers={"probe": {"won": 1}})), "counts 'won'"),
    (json.dumps(result(tiers={"probe": {"passed": -1}})), "counts 'passed'"),
    (json.dumps(result(tiers={}, results=[{**FAILED, "outcome": "<script>"}])), "outcome is '<script>'"),
    (json.dumps(result(xamp=1)), "1 stands where a text is needed"),
]


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    with cases() as case:
        for text, why in NO_RESULTS:
            file.write_text(text)
            with case(why):
                with pytest.raises(ResultError, match=why):
                    read(file)
                pages = ["--html", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]
                assert report.main([str(file), *pages]) == 2
                assert "a.json" in capsys.readouterr().err
                assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("private", ["/home/somebody/x.py", "C:\\Users\\x.py", "~/x.py", "node7.cluster.internal"])
def test_a_result_that_names_a_path_or_a_host_is_refused_until_it_is_cleaned(tmp_path: Path, private: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(result(results=[{**FAILED, "reason": f"in {private}:3: assert 1 == 2"}])))
    with pytest.raises(ResultError, match="names a path or a host"):
        read(file)
    assert report.main(["--keep", str(tmp_path / "kept"), str(file)]) == 0
    (note,) = read(tmp_path / "kept" / "a.json").notes
    assert "assert 1 == 2" in note.reason
    assert private not in note.reason


PRIVATE: list[dict[str, Any]] = [
    {"results": [{**FAILED, "reason": "File:/home/somebody/x.py"}]},
    {"results": [{**FAILED, "reason": "file:///home/somebody/x.py"}]},
    {"results": [{**FAILED, "clause": "scaling./home/x.py /home/somebody/x.py"}]},
    {"clauses": ["/home/somebody/x.py"]},
    {"xamp": "0.1.0 /home/somebody/x"},
]


def test_every_text_that_is_shown_is_searched_for_paths(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with cases() as case:
        for changes in PRIVATE:
            file.write_text(json.dumps(result(**changes)))
            with case(changes), pytest.raises(ResultError, match="names a path or a host"):
                read(file)


def test_what_is_kept_says_the_same(tmp_path: Path, page: Any) -> None:
    file = tmp_path / "whole.json"
    file.write_text(json.dumps(result()))
    assert page(kept(file)) == page(result())
    assert len(json.dumps(kept(file))) < len(json.dumps(result()))


def test_check_tells_of_old_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(result()))
    words = [str(file), "--html", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]
    assert report.main([*words, "--check"]) == 1
    assert "a.md and a.html differ" in capsys.readouterr().err
    assert report.main(words) == 0
    assert report.main([*words, "--check"]) == 0
    (tmp_path / "a.md").write_text("old")
    assert report.main([*words, "--check"]) == 1
