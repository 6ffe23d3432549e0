"""Each rule by its two tables: what it rewrites, and what it leaves alone. The tables are those of docs/porting.md.

Covers: xamp.port.rules.*.
"""

from __future__ import annotations

import ast
import importlib

import pytest

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.apex._modules import MODULES
from xamp.port.engine import port_text
from xamp.port.rule import Grade, Rule
from xamp.port.rules import built_in

RULES = built_in()
EXAMPLES = [
    pytest.param(rule, example, id=f"{rule.name}-{number}")
    for rule in RULES
    for number, example in enumerate(rule.examples)
]
UNCHANGED = [
    pytest.param(rule, text, id=f"{rule.name}-{number}") for rule in RULES for number, text in enumerate(rule.unchanged)
]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_examples_come_out_as_written(rule: Rule, example: tuple[str, str | None]) -> None:
    before, after = example
    ported = port_text(before)
    assert ported.text == (before if after is None else after)
    assert ported.findings
    ast.parse(ported.text)


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_a_second_run_changes_nothing(rule: Rule, example: tuple[str, str | None]) -> None:
    once = port_text(example[0]).text
    assert port_text(once).text == once


@pytest.mark.parametrize(("rule", "text"), UNCHANGED)
def test_what_only_looks_alike_stays(rule: Rule, text: str) -> None:
    assert port_text(text).text == text


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_windows_line_endings_and_tabs_stay(rule: Rule, example: tuple[str, str | None]) -> None:
    before, after = (
        text.replace("    ", "\t").replace("\n", "\r\n") for text in (example[0], example[1] or example[0])
    )
    assert port_text(before).text == after


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_says_what_it_does(rule: Rule) -> None:
    assert rule.__doc__
    assert rule.examples or rule.grade is not Grade.CERTAIN
    assert rule.unchanged


def test_names_of_rules_are_unique() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert all(name and name == name.lower() for name in names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_is_written_exists(rule: Rule) -> None:
    missing = [
        target.new
        for target in rule.names.values()
        if target.new is not None and target.grade is Grade.CERTAIN and not exists(target.new)
    ]
    assert missing == []


@pytest.mark.parametrize("part", [name for name in MODULES if name.count(".") >= 1 and ".amp" not in name])
def test_every_public_name_of_xamp_apex_is_in_the_tables(part: str) -> None:
    table = {path: target for rule in RULES for path, target in rule.names.items()}
    names = getattr(importlib.import_module(MODULES[part]), "__all__", ())
    left = [name for name in names if f"{part}.{name}" not in table and f"{part}.{name}" not in MODULES]
    if part in table and not table[part].is_module:  # all that is in it moves along
        return
    if part in _FILES_THAT_HOLD_LESS:  # one module of xamp answers for several files of Apex
        assert set(names) - set(left), f"{part} leads nowhere"
    else:
        assert left == []


_FILES_THAT_HOLD_LESS = {name for name in MODULES if list(MODULES.values()).count(MODULES[name]) > 1}


def exists(path: str) -> bool:
    """Whether a dotted path leads to a module, or to a name in one."""
    home, _, name = path.rpartition(".")
    try:
        return (bool(home) and hasattr(importlib.import_module(home), name)) or bool(importlib.import_module(path))
    except ImportError:
        return False


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_a_comment_keeps_a_line(rule: Rule, example: tuple[str, str | None]) -> None:
    lines = example[0].splitlines()
    if any(line.endswith(("\\", "(", ",", '"""', "'''")) for line in lines):
        pytest.skip("a line that goes on has no place for a comment")
    kept = "".join(f"{line}  # xamp: ignore\n" if line.strip() else "\n" for line in lines)
    assert port_text(kept).text == kept
