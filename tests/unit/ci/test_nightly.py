"""ci/nightly.sh: a part is run once for the content that it tests, and what came of it is kept with that content."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT

from ci.nightly import __main__ as nightly
from ci.nightly.content import hash_of
from ci.nightly.parts import Part, parts
from ci.stages.stage import Stage, Step

PLACE = "ci/nightly.sh"


def does(name: str, *codes: str, place: str = PLACE) -> Part:
    """A part whose commands are programs."""
    steps = [Step(f"{name} {index}", [sys.executable, "-c", code]) for index, code in enumerate(codes)]
    return Part(Stage(name, f"does {name}", 60.0, steps), [place])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Calls the command on parts that only seem to be work."""

    def call(words: Sequence[str], *table: Part) -> int:
        return nightly.main([*words, "--out", str(tmp_path / "out")], lambda _: table, tmp_path / "kept")

    return call


def kept(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kept" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_what_came_of_a_part_is_kept_with_the_content(run: Callable[..., int], tmp_path: Path) -> None:
    assert run([], does("good", "pass"), does("bad", "raise SystemExit(3)")) == 1
    content = hash_of(ROOT, [PLACE])
    assert {key: kept(tmp_path, "good")[key] for key in ("outcome", "content")} == {
        "outcome": "passed",
        "content": content,
    }
    assert kept(tmp_path, "bad")["outcome"] == "failed"
    assert kept(tmp_path, "bad")["reason"] == "bad 0 ended with code 3"


def test_a_part_is_run_once_for_a_content(run: Callable[..., int], tmp_path: Path) -> None:
    place = tmp_path / "ran"
    code = f"open({str(place)!r}, 'a').write('.')"
    assert run([], does("some", code)) == run([], does("some", code)) == 0
    assert place.read_text() == "."
    assert run([], does("some", code, place="ci/gpu.sh")) == 0  # another content
    assert place.read_text() == ".."
    assert run(["--fresh"], does("some", code, place="ci/gpu.sh")) == 0
    assert run([], does("some", code, place="ci/gpu.sh")) == 0
    assert place.read_text() == "..."


def test_what_is_changed_is_run(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, other = does("some", "pass"), does("other", "raise SystemExit(1)")
    assert run(["--changed", "some"], some, other) == 0
    said = capsys.readouterr().out
    assert "some: never run\nother: never run\n" in said
    assert not (tmp_path / "kept" / "other.json").exists()  # it was not named
    assert run(["--changed", "some"], some, other) == 0
    said = capsys.readouterr().out
    assert "some: passed on 2" in said
    assert "on the content as it is\nother: never run\n" in said
    assert "== some" not in said
    assert run(["--changed", "some"], does("some", "raise SystemExit(1)", place="ci/gpu.sh"), other) == 1
    assert "on other content" in capsys.readouterr().out
    assert run(["--changed", "some"], does("some", "pass", place="ci/gpu.sh"), other) == 1  # it failed, and is kept
    assert run(["--changed", "some", "--again"], does("some", "pass", place="ci/gpu.sh"), other) == 0


def test_content_that_changes_meanwhile_is_not_what_was_tested(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = iter(["before", "after"])
    monkeypatch.setattr(nightly, "hash_of", lambda *_: next(hashes))
    run([], does("some", "pass"))
    assert not (tmp_path / "kept").exists()


def test_what_it_says_besides_is_kept(run: Callable[..., int], tmp_path: Path) -> None:
    """What an exit code means is told too where it is no failure."""
    steps = [Step("asks", [sys.executable, "-c", "raise SystemExit(4)"], accepts=(0, 4), says={4: "not today"})]
    part = Part(Stage("asks", "asks", 60.0, steps), [PLACE], {"torch": "2.7.1", "python": "3.1"})
    assert run([], part) == 0
    told = {key: kept(tmp_path, "asks")[key] for key in ("outcome", "reason", "torch", "python")}
    assert told == {"outcome": "passed", "reason": "not today", "torch": "2.7.1", "python": "3.1"}


def test_what_asks_something_outside_is_run_each_time(run: Callable[..., int], tmp_path: Path) -> None:
    place = tmp_path / "ran"
    part = does("asks", f"open({str(place)!r}, 'a').write('.')")
    anew = dataclasses.replace(part, stage=dataclasses.replace(part.stage, anew=True))
    assert run([], anew) == run([], anew) == 0
    assert place.read_text() == ".."


def test_an_unknown_part(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["coverag"], does("coverage", "pass")) == 2
    assert "no stage is called coverag. There are coverage" in capsys.readouterr().err


def test_a_hash_is_of_names_and_of_what_is_in_files(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    first = hash_of(tmp_path, ["a/"])
    (tmp_path / "a" / "one.pyc").write_text("ignored")
    assert hash_of(tmp_path, ["a/"]) == hash_of(tmp_path, ["a/", "a/one"]) == first
    (tmp_path / "a" / "one").write_text("2")
    second = hash_of(tmp_path, ["a/"])
    (tmp_path / "a" / "one").rename(tmp_path / "a" / "two")
    assert len({first, second, hash_of(tmp_path, ["a/"])}) == 3
    with pytest.raises(ValueError, match="there is no b/ in the checkout"):
        hash_of(tmp_path, ["b/"])


def test_each_part_is_of_a_content_that_is_there() -> None:
    for part in parts(2):
        hash_of(ROOT, part.content)
