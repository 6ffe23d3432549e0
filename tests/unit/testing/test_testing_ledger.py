"""Ledgers: what is read, what is refused, and that they are strict both ways.

Covers: xamp.testing.ledger.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mutants import registered

from xamp.errors import PolicyError
from xamp.registry.registry import BUILT_INS
from xamp.testing.lane import open_lane
from xamp.testing.ledger import Entry, Ledger, read_ledger
from xamp.testing.run import Result, run

GAP = {"clause": "probe.runtime", "reason": "it lists a device twice", "link": "https://example.org/1"}
BROKEN = registered("probe_mutants:CountsTwice")


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    def write(*entries: Any) -> str:
        path = tmp_path / "ledger.json"
        path.write_text(json.dumps(entries), encoding="utf-8")
        return str(path)

    return write


def outcome(results: list[Result]) -> list[tuple[str, str, str]]:
    return [(result.clause, result.outcome, result.reason) for result in results]


def test_a_gap_that_is_in_the_ledger_is_known(ledger: Any) -> None:
    with BROKEN():
        results = run([open_lane("mutant")], ["probe.runtime", "probe.seed"], ledger=ledger(GAP))
    assert outcome(results) == [
        ("probe.runtime", "known gap", "it lists a device twice (https://example.org/1)"),
        ("probe.seed", "passed", ""),
    ]


def test_a_gap_that_is_not_in_the_ledger_fails(ledger: Any) -> None:
    with BROKEN():
        results = run([open_lane("mutant")], ["probe.runtime"], ledger=ledger({**GAP, "clause": "probe.seed"}))
    assert outcome(results)[0][:2] == ("probe.runtime", "failed")


def test_a_gap_that_is_closed_fails(ledger: Any) -> None:
    results = run([open_lane("cpu")], ["probe.runtime"], ledger=ledger(GAP))
    ((clause, became, reason),) = outcome(results)
    assert (clause, became) == ("probe.runtime", "failed")
    assert reason.startswith("in the ledger as a known gap, and passes; take it out: it lists a device twice")


def test_an_entry_that_names_no_clause_fails(ledger: Any) -> None:
    results = run([open_lane("cpu")], ["probe.ledger"], ledger=ledger({**GAP, "clause": "probe.run_time"}))
    assert outcome(results)[0][:2] == ("probe.ledger", "failed")
    assert "probe.run_time" in results[0].reason


def test_entries_count_on_devices_of_their_name(ledger: Any) -> None:
    place = ledger({**GAP, "device": "one"}, {**GAP, "clause": "probe.seed", "device": "*9000*"})
    with BROKEN():
        results = run([open_lane("mutant")], ["probe.runtime", "probe.seed"], ledger=place)
    assert [result.outcome for result in results] == ["known gap", "passed"]


def test_a_spec_names_the_ledger(ledger: Any) -> None:
    with registered("probe_mutants:CountsTwice", ledger=ledger(GAP))():
        results = run([open_lane("mutant")], ["probe.runtime"])
    assert [result.outcome for result in results] == ["known gap"]


@pytest.mark.parametrize(
    ("clause", "pattern", "about"),
    [
        ("scaling.floor[O1]", "scaling.floor[O1]", True),
        ("scaling.floor[O1]", "scaling.floor[*]", True),
        ("scaling.floor[O1]", "scaling.floor", False),
        ("scaling.floor[O1]", "scaling.floor[O]", False),
        ("scaling.floorXO1]", "scaling.floor[O1]", False),
        ("scaling.floor", "scaling.*", True),
    ],
)
def test_patterns(clause: str, pattern: str, about: bool) -> None:
    assert Entry(pattern, "r", "l").names(clause) is about


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "must be a list of entries, not dict"),
        ('["x"]', "entry 0: must be an object of strings that are not empty, not 'x'"),
        ('[{"clause": "a", "reason": "", "link": "b"}]', "strings that are not empty"),
        ('[{"clause": "a", "link": "b"}]', r"lacks \['reason'\]"),
        ('[{"clause": "a", "reason": "b", "link": "c", "why": "d"}]', r"has beside \['why'\]"),
    ],
)
def test_what_is_no_ledger_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError, match=message):
        read_ledger(str(path))


def test_a_ledger_lies_beside_a_module_too(ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger(GAP)
    (tmp_path / "xamp_one_file.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_ledger("xamp_one_file:ledger.json").entries == (Entry(**GAP),)


def test_a_ledger_that_is_not_there_is_refused() -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        read_ledger("no/such/ledger.json")
    with pytest.raises(PolicyError, match="cannot be read"):
        read_ledger("xamp.backends:ledger/none.json")
    with pytest.raises(PolicyError, match="there is no package 'no_such_package'"):
        read_ledger("no_such_package:ledger.json")


def test_those_of_the_built_ins_can_be_read() -> None:
    places = [spec.ledger for spec in BUILT_INS if spec.ledger]
    assert places
    for place in places:
        assert isinstance(read_ledger(place), Ledger)
