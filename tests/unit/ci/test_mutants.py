"""The mutation gate: what it makes of code, which it takes, and what it says of them.

Covers: ci/mutants.py.
"""

from __future__ import annotations

import ast

import pytest
from ci_scripts import ROOT

from ci import mutants


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["boundary: a < b -> (a <= b)", "negated: a < b -> (a >= b)"]),
        ("x = a and b", ["and-or: a and b -> (a or b)"]),
        ("x = not a", ["not: not a -> (a)"]),
        ("x *= a", ["arithmetic: x *= a -> x /= a", "deleted: x *= a -> pass"]),
        ("x = [0, 2, 0.0, 0.5, True]", ["0 -> 1", "2 -> 3", "0.0 -> 1.0", "0.5 -> 1.0", "True -> False"]),
        ("return a", ["returned: return a -> return None"]),
        ("x.y = a", ["deleted: x.y = a -> pass"]),
        ("x = f(a, b.c)", ["swapped: f(a, b.c) -> (f(b.c, a))"]),
        ("x = any(a)", ["other-call: any -> all"]),
        ("x = a if b else c", ["forced: b -> (True)", "forced: b -> (False)"]),
        ("with a, b(): c = d", ["with: with a, b(): -> if True:"]),
        ("@a\n    def g(): b = c", ["decorator: @a -> nothing"]),
        ("x: Literal[1] = 'text' + a", []),
        ("assert isinstance(a, B) and 1 < 2, f'{1 + 2}'", []),
    ],
)
def test_each_operator(line: str, expected: list[str]) -> None:
    text = f"def f():\n    {line}\n"
    made = mutants.mutants_of("m.py", text)
    assert [f"{each.identity.split('::')[2]}: {each.change}".removeprefix("constant: ") for each in made] == expected
    sources = {ast.unparse(ast.parse(each.source(text))) for each in made}
    assert len(sources - {ast.unparse(ast.parse(text))}) == len(expected)


def test_the_table_is_true() -> None:
    table = mutants.tomllib.loads((ROOT / "ci" / "mutants.toml").read_text(encoding="utf-8"))
    assert mutants.untrue(table) == []
    table["equivalent"] += [{**table["equivalent"][0], "mutant": f"xamp/policy.py::gone::not::{k}"} for k in (1, 2)]
    assert len(mutants.untrue(table)) == 2
