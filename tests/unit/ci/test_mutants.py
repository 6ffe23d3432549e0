"""The mutation gate: what it makes of code, which it takes, and what it says of them.

Covers: ci/mutants.py.
"""

from __future__ import annotations

import ast

from ci_scripts import ROOT

from ci import mutants

MADE = {
    "x = a < b": ["boundary: a < b -> (a <= b)", "negated: a < b -> (a >= b)"],
    "x = a and not b": ["and-or: a and not b -> (a or not b)", "not: not b -> (b)"],
    "x *= a": ["arithmetic: x *= a -> x /= a", "deleted: x *= a -> pass"],
    "x = [0, 2, 0.0, 0.5, True]": ["0 -> 1", "2 -> 3", "0.0 -> 1.0", "0.5 -> 1.0", "True -> False"],
    "return a": ["returned: return a -> return None"],
    "x.y = f(a, b.c)": ["deleted: x.y = f(a, b.c) -> pass", "swapped: f(a, b.c) -> (f(b.c, a))"],
    "x = any(a)": ["other-call: any -> all"],
    "x = a if b else c": ["forced: b -> (True)", "forced: b -> (False)"],
    "with a, b(): c = d": ["with: with a, b(): -> if True:"],
    "@a\n    def g(): b = c": ["decorator: @a -> nothing"],
    "x: Literal[1] = 'text' + a": [],
    "assert isinstance(a, B) and 1 < 2, f'{1 + 2}'": [],
}


def test_each_operator() -> None:
    for line, expected in MADE.items():
        text = f"def f():\n    {line}\n"
        made = mutants.mutants_of("m.py", text)
        told = [f"{each.identity.split('::')[2]}: {each.change}".removeprefix("constant: ") for each in made]
        assert sorted(told) == sorted(expected)
        sources = {ast.unparse(ast.parse(each.source(text))) for each in made}
        assert len(sources - {ast.unparse(ast.parse(text))}) == len(expected)


def test_the_table_is_true() -> None:
    table = mutants.tomllib.loads((ROOT / "ci" / "mutants.toml").read_text(encoding="utf-8"))
    assert mutants.untrue(table) == []
    table["equivalent"] += [{**table["equivalent"][0], "mutant": "xamp/policy.py::gone::not::1"}]
    assert len(mutants.untrue(table)) == 1
