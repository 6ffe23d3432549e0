"""The mutation gate: what it makes of code, what it leaves alone, which tests it runs, and what it says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT

from ci.mutants import __main__ as mutants
from ci.mutants import kept as mutants_kept
from ci.mutants import reach as mutants_reach
from ci.mutants.made import drawn, mutants_of, spans
from ci.mutants.run import Result


def changes(text: str) -> list[str]:
    """What the mutants of a module change, as ``operator: old -> new``."""
    return [f"{each.operator}: {each.change}" for each in mutants_of("m.py", text)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["boundary: a < b -> (a <= b)", "negated: a < b -> (a >= b)"]),
        ("x = a is None", ["negated: a is None -> (a is not None)"]),
        (
            "x = a <= b == c",
            [
                f"{kind}: a <= b == c -> ({new})"
                for kind, new in (("boundary", "a < b == c"), ("negated", "a > b == c"), ("negated", "a <= b != c"))
            ],
        ),
        ("x = a and b", ["and-or: a and b -> (a or b)"]),
        ("x = not a", ["not: not a -> (a)"]),
        ("x = a - b", ["arithmetic: a - b -> (a + b)"]),
        ("x = -a", ["arithmetic: -a -> (a)"]),
        ("x *= a", ["arithmetic: x *= a -> x /= a", "deleted: x *= a -> pass"]),
        (
            "x = [0, 1, 2, 0.0, 0.5, True]",
            [
                f"constant: {each}"
                for each in ("0 -> 1", "1 -> 0", "2 -> 3", "0.0 -> 1.0", "0.5 -> 1.0", "True -> False")
            ],
        ),
        ("return a", ["returned: return a -> return None"]),
        (
            "return a == b",
            [
                "returned: return a == b -> return True",
                "returned: return a == b -> return False",
                "negated: a == b -> (a != b)",
            ],
        ),
        ("return", ["deleted: return -> pass"]),
        ("x.y = a", ["deleted: x.y = a -> pass"]),
        ("x[a]: int = b", ["deleted: x[a]: int = b -> pass"]),
        ("f(a)", ["deleted: f(a) -> pass"]),
        ("raise E(a)", ["deleted: raise E(a) -> pass"]),
        ("x = f(a, b.c, 2)", ["swapped: f(a, b.c, 2) -> (f(b.c, a, 2))", "constant: 2 -> 3"]),
        ("x = any(a)", ["other-call: any -> all"]),
        ("x = a if b else c", ["forced: b -> (True)", "forced: b -> (False)"]),
        ("while a: b = c", ["forced: a -> (False)"]),
        ("x = [a for a in b if a]", ["forced: a -> (True)"]),
        ("with a, b(): c = d", ["with: with a, b(): -> if True:"]),
        ("@a\n    def g(): b = c", ["decorator: @a -> nothing"]),
    ],
)
def test_each_operator(line: str, expected: list[str]) -> None:
    assert changes(f"def f():\n    {line}\n") == expected


@pytest.mark.parametrize(
    "line",
    [
        '"""A text with 1 and a < b."""',
        "x: Literal[1] | None = a",
        "x = a",
        "x = 'text' + a",
        "assert isinstance(a, B) and 1 < 2",
        "raise E(f'{1 + 2}', a < b)" + " if a else None",
        "x = isinstance(a, B | C)",
        "x = cast(A, b)",
        "x = f'{1 + 2}'",
        "x = a.addcmul_(b, c)",
        "with a as b: c = d",
    ],
)
def test_what_no_test_should_hold_is_left_alone(line: str) -> None:
    assert [each for each in changes(f"def f():\n    {line}\n") if not each.startswith("deleted: raise")] == []


def test_what_only_declares_is_left_alone() -> None:
    text = """__all__ = ["f" * 1]
if TYPE_CHECKING:
    x = 1
@overload
def f(a: int = 1) -> None: return a
class A:
    __slots__ = (1,)
    @abc.abstractmethod
    def g(self) -> int: return 1 + 1
    @property
    def h(self): a = b
"""
    assert changes(text) == []
    text = "@overload\ndef f(a: int) -> None: ...\ndef f(a):\n    return a\n"
    assert [each.name for each in spans(text)] == ["<module>", "f"]  # however many overloads there are
    assert [each.function for each in mutants_of("m.py", text)] == ["f"]


TEXT = """
def first(a):
    if a > 1:
        return a
    return a + 1

class C:
    @property
    def p(self):
        return self.a * 2

    @p.setter
    def p(self, a):
        self.a = (a,
                  2)
"""


def test_an_edit_elsewhere_renames_nothing() -> None:
    before = {each.identity: each.source(TEXT) for each in mutants_of("m.py", TEXT)}
    assert "m.py::C.p~2::deleted::1" in before
    head = "x = 1\n\ndef new(a):\n    return a > 1\n"
    after = {each.identity: each.source(head + TEXT) for each in mutants_of("m.py", head + TEXT)}
    assert len(before) == 14
    assert {name: head + source for name, source in before.items()} == {name: after[name] for name in before}


def test_one_that_is_new_changes_nobodys_lot() -> None:
    text = "".join(f"def f{k}(a):\n    return a > {k}\n" for k in range(40))
    old, new = mutants_of("m.py", text), mutants_of("m.py", f"def g(a):\n    return a > 7\n{text}")
    first, second = ({each.identity for each in drawn(row, 20, "seed")} for row in (old, new))
    assert len(first) == len(second) == 20
    assert len(first & second) >= 17  # 5 of 205 are new
    assert first < {each.identity for each in drawn(old, 21, "seed")}
    assert first != {each.identity for each in drawn(old, 20, "other")}


@pytest.mark.parametrize("name", ["scale", "fused", "moves"])
def test_each_mutant_of_a_module_is_code_and_keeps_the_lines(name: str) -> None:
    text = (ROOT / "xamp" / "scaling" / f"{name}.py").read_text(encoding="utf-8")
    every = mutants_of("m.py", text)
    assert len({each.identity for each in every}) == len(every) > 150
    for each in every[::3]:
        source = each.source(text)
        compile(source, "m.py", "exec")
        assert source.count("\n") == text.count("\n"), each
        rows = enumerate(zip(source.split("\n"), text.split("\n"), strict=True), 1)
        assert {number for number, (new, old) in rows if new != old} <= {*each.lines}, each


# ---------------------------------------------------------------- the map


def reach_of(text: str, tests: dict[str, float], lines: dict[int, list[int]]) -> Any:
    (span,) = spans(text)[1:]
    return mutants_reach.Reach([*tests], [*tests.values()], {"m.py": {span.name: (span.digest, lines)}})


def test_the_cheapest_come_first_and_one_case_of_each() -> None:
    text = "x = 1\ndef f():\n    a()\n    b()\n"
    tests = {"t.py::a[1]": 0.3, "t.py::a[2]": 0.1, "u.py::b": 0.2, "t.py::c": 0.4, "u.py::d": 9.0}
    reach = reach_of(text, tests, {1: [0, 1, 2, 3], 2: [4]})
    span = spans(text)[1:]
    assert reach.tests_of("m.py", span, range(3, 4), 60) == ["t.py::a[2]", "t.py::c", "u.py::b", "t.py::a[1]"]
    assert reach.tests_of("m.py", span, range(3, 4), 0.35) == ["t.py::a[2]", "u.py::b"]
    assert reach.tests_of("m.py", span, range(4, 5), 1) == ["u.py::d"]  # one at least
    assert reach.tests_of("m.py", span, range(1, 3), 60) == []
    many = {f"t.py::a[{case}]": 0.01 * case for case in range(6)} | {f"u.py::b[{case}]": 1.0 for case in range(2)}
    order = reach_of(text, many, {1: [*range(8)]}).tests_of("m.py", span, range(3, 4), 60)
    assert [name[6:-1] for name in order] == ["a[0", "b[0", "a[1", "a[2", "a[3", "b[1", "a[4", "a[5"]
    rare = reach_of(text, {"t.py::a": 0.1, "u.py::b": 0.2, "v.py::c": 0.3}, {1: [0, 1, 2], 2: [1, 2]})
    assert rare.tests_of("m.py", span, range(3, 4), 60) == ["u.py::b", "v.py::c", "t.py::a"]
    lower = f"\n\n{text}"
    assert reach.tests_of("m.py", spans(lower)[1:], range(6, 7), 60) == ["u.py::d"]
    changed = text.replace("b()", "c()")
    assert len(reach.tests_of("m.py", spans(changed)[1:], range(3, 4), 60)) == 5


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    reach = reach_of("def f():\n    a()\n    b()\n", {"t": 0.3, "u": 0.1}, {1: [0, 1], 2: [1]})
    reach.write(tmp_path / "map.json")
    assert mutants_reach.Reach.read(tmp_path / "map.json") == reach
    assert mutants_reach.Reach.read(tmp_path / "none.json").tests == []


def test_without_a_map_the_tests_of_the_room_are_taken(tmp_path: Path) -> None:
    (mutant, *_) = mutants_of("xamp/scaling/scale.py", (ROOT / "xamp/scaling/scale.py").read_text(encoding="utf-8"))
    assert mutants_reach.Choice(mutants_reach.Reach(), ROOT).mapped(mutant) == []
    found = mutants_reach.room_of(mutant.file, ROOT)
    assert "tests/unit/scaling/test_step_scale.py" in found
    assert {Path(each).parent for each in found} == {Path("tests/unit/scaling")}
    assert mutants_reach.room_of("xamp/policy.py", ROOT) == ["tests/unit/test_policy.py"]
    assert mutants_reach.room_of("xamp/casting/ops/fixed_dtype.py", ROOT)[0] == "tests/unit/casting/test_fixed_dtype.py"
    assert mutants_reach.room_of("xamp/elsewhere/plan.py", ROOT) == [], "it has none: the map knows its tests"


def test_files_that_the_map_does_not_know_come_last(project: Path) -> None:
    file, test = "xamp/room/code.py", "tests/unit/room/test_code.py"
    (mutant, *_) = mutants.made([file], project)[file]
    reach = mutants_reach.Reach([f"{test}::test_small"], [0.1], {file: {"limit": (mutant.span.digest, {1: [0]})}})
    choice = mutants_reach.Choice(reach, project)
    assert choice.mapped(mutant) == [f"{test}::test_small", test]
    reach.files[test] = mutants_reach._digest(project / test)
    assert choice.mapped(mutant) == [f"{test}::test_small"]
    (project / test).with_name("test_new.py").write_text("", encoding="utf-8")
    new = "tests/unit/room/test_new.py"
    assert choice.mapped(mutant) == [f"{test}::test_small", new]
    also = mutants_reach.Choice(reach, project, {}, {file: ["tests/a.py"]})
    assert also.mapped(mutant) == [f"{test}::test_small", new, "tests/a.py"]
    assert also.of_room(mutant) == [test, new, "tests/a.py"]


# ---------------------------------------------------------------- a small project of its own

CODE = """def limit(a):
    if a > 3:
        return 3
    return a


def idle(a):
    return a + 0 * 1
"""
TESTS = """from xamp.room.code import idle, limit
import subprocess, sys

def test_small():
    assert limit(1) == 1

def test_large():
    assert limit(5) == 3

def test_a_child_has_it_too():
    words = [sys.executable, "-c", "from xamp.room.code import idle; print(idle(4))"]
    assert subprocess.run(words, capture_output=True, text=True, cwd="/").stdout == "4\\n"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"xamp/__init__.py": "", "xamp/room/__init__.py": "", "xamp/room/code.py": CODE}
    files |= {"tests/unit/room/test_code.py": TESTS, "pyproject.toml": "[tool.pytest.ini_options]\n"}
    files |= {"tests/conftest.py": "", "tests/support/helper.py": "", ".gitignore": "__pycache__\n.mutants\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a")


DRIVER = """
import importlib.util, json, sys
from pathlib import Path
sys.path.insert(0, {checkout!r})
from ci.mutants import __main__ as mutants, kept as mutants_kept, reach as mutants_reach, run as mutants_run
root = Path.cwd()
{body}
"""


def drive(project: Path, body: str) -> Any:
    """Run ``body`` in a process of its own, which may fork: this one has used torch. Return what it prints, as JSON."""
    text = DRIVER.format(checkout=str(ROOT), body=body)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=project, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_killed_and_what_survives(project: Path) -> None:
    body = """
every = mutants.made(["xamp/room/code.py"], root)["xamp/room/code.py"]
results = mutants.Results(root / ".mutants" / "results.json", ["tests/unit"], root)
wrong = mutants.run(every, mutants_reach.Choice(mutants_reach.Reach(), root), results, 2)
again = mutants.Results(root / ".mutants" / "results.json", ["tests/unit"], root)
kept = {each.identity.partition("::")[2]: again.get(each) for each in every}
print(json.dumps([wrong, {name: [found["ended"], found["test"].rpartition("::")[2]] for name, found in kept.items()}]))
"""
    wrong, found = drive(project, body)
    assert wrong == []
    assert found == {
        "limit::forced::1": ["failed", "test_small"],
        "limit::forced::2": ["failed", "test_large"],
        "limit::boundary::1": ["passed", ""],  # limit(3) is 3 either way
        "limit::negated::1": ["failed", "test_small"],
        "limit::constant::1": ["passed", ""],  # 4 for 3: nothing tries 4
        "limit::constant::2": ["failed", "test_large"],
        "limit::returned::1": ["failed", "test_small"],
        "idle::returned::1": ["failed", "test_a_child_has_it_too"],
        "idle::arithmetic::1": ["passed", ""],
        "idle::arithmetic::2": ["failed", "test_a_child_has_it_too"],
        "idle::constant::1": ["failed", "test_a_child_has_it_too"],
        "idle::constant::2": ["passed", ""],
    }
    assert (project / "xamp/room/code.py").read_text(encoding="utf-8") == CODE


def test_a_fault_may_hang_kill_the_process_or_break_the_import(project: Path) -> None:
    body = """
mutants_run.CPU_LIMIT = 4
code, tests = "xamp/room/code.py", ["tests/unit/room/test_code.py"]
text = (root / code).read_text()
hangs, dies = (text.replace(":", f":\\n    {line}", 1) for line in ("while True: pass", "import os; os.abort()"))
sources = enumerate([hangs, dies, "raise E\\n", text])
runs = [mutants_run.Run(tests, code, source, about=number) for number, source in sources]
runs.append(mutants_run.Run(["tests/unit/room/test_gone.py"], about=4))
with mutants_run.Trees(root, 2) as trees:
    found = {run.about: [result.ended, result.killed] for run, result in mutants_run.run_all(runs, trees)}
print(json.dumps([[found[number] for number in range(5)], trees[0].exists()]))
"""
    ends, still_there = drive(project, body)
    assert ends == [["time", True], ["died", True], ["no import", True], ["passed", False], ["not run", False]]
    assert not still_there


def test_the_test_that_killed_last_time_is_tried_first(project: Path) -> None:
    """Where it is gone, or notices nothing any more, the others decide."""
    body = """
every = {each.identity.partition("::")[2]: each for each in mutants.made(["xamp/room/code.py"], root).popitem()[1]}
some = [every[f"limit::{name}"] for name in ("negated::1", "forced::1", "forced::2", "boundary::1")]
file = "tests/unit/room/test_code.py"
killers = [f"{file}::{test}" for test in ("test_large", "test_gone", "test_small", "test_small")]
results = mutants.Results(root / ".mutants" / "results.json", ["tests/unit"], root)
known = {each.identity: killer for each, killer in zip(some, killers)}
wrong = mutants.run(some, mutants_reach.Choice(mutants_reach.Reach(), root, known), results, 1)
mutants_kept.write_killers(some, results, root / "killers.tsv")
kept = mutants_kept.read_killers(root / "killers.tsv")
print(json.dumps([wrong, [kept.get(each.identity, "").rpartition("::")[2] for each in some]]))
"""
    wrong, kept = drive(project, body)
    assert wrong == []
    assert kept == ["test_large", "test_small", "test_large", ""]


def test_a_test_that_fails_by_itself_kills_nothing(project: Path) -> None:
    test = project / "tests/unit/room/test_code.py"
    test.write_text("from xamp.room.code import limit\n\ndef test_wrong():\n    assert limit(0)\n", encoding="utf-8")
    body = """
every = mutants.made(["xamp/room/code.py"], root)["xamp/room/code.py"][:2]
results = mutants.Results(root / ".mutants" / "results.json", ["tests/unit"], root)
wrong = mutants.run(every, mutants_reach.Choice(mutants_reach.Reach(), root), results, 1)
print(json.dumps([wrong, [results.get(each) for each in every]]))
"""
    wrong, kept = drive(project, body)
    assert wrong == ["tests/unit/room/test_code.py::test_wrong fails without a fault, too"]
    assert kept[1] is None
    assert kept[0]["ended"] == "passed"  # always 3


def test_the_map_says_which_test_reaches_which_line(project: Path) -> None:
    body = """
reach = mutants_reach.make_map(["xamp/room/code.py"], ["tests/unit"], root, root / ".mutants", 1)
(digest, lines), costs = reach.functions["xamp/room/code.py"]["limit"], dict(zip(reach.tests, reach.costs))
names = {line: [reach.tests[test].rpartition("::")[2] for test in tests] for line, tests in lines.items()}
print(json.dumps([names, [seconds >= 0 for seconds in costs.values()], len(costs)]))
"""
    lines, costs, count = drive(project, body)
    assert lines == {"1": ["test_small", "test_large"], "2": ["test_large"], "3": ["test_small"]}
    assert count == 3
    assert all(costs)


def test_changed_functions(project: Path) -> None:
    code = project / "xamp/room/code.py"
    assert mutants.changed_functions("HEAD", project) == {}
    code.write_text(f"# more\n{CODE.replace('a > 3', 'a >= 3')}", encoding="utf-8")
    assert mutants.changed_functions("HEAD", project) == {"xamp/room/code.py": {"limit", "<module>"}}
    git(project, "checkout", "-q", "-b", "branch")
    commit(project)
    (project / "xamp/new.py").write_text("def f(): return 1\n", encoding="utf-8")
    base = mutants.where_the_branch_began(project)
    assert mutants.changed_functions(base, project) == {
        "xamp/room/code.py": {"limit", "<module>"},
        "xamp/new.py": {"f"},
    }
    code.write_text(CODE.replace("a > 3", "a >= 3"), encoding="utf-8")
    assert mutants.changed_functions("main", project)["xamp/room/code.py"] == {"limit"}


# ---------------------------------------------------------------- the table, and what is kept


def test_the_table_is_true() -> None:
    table = mutants.read()
    assert mutants.untrue(table) == []
    assert all(count > 0 for count in table.modules.values())
    assert all((ROOT / each).exists() for each in table.tests)


def test_an_entry_that_is_not_true_is_told(project: Path) -> None:
    file, change = "xamp/room/code.py", "a > 3 -> (a >= 3)"
    (project / "table.toml").write_text(
        f"""seed = "s"
tests = []
[modules]
"{file}" = 2
"xamp/gone.py" = 1
[[equivalent]]
mutant = "{file}::limit::boundary::1"
change = "{change}"
why = "it is"
[[equivalent]]
mutant = "{file}::limit::boundary::2"
change = "{change}"
why = "it is"
[[equivalent]]
mutant = "{file}::limit::negated::1"
change = "{change}"
why = " "
[[equivalent]]
mutant = "{file}::limit::boundary::1"
change = "{change}"
why = "twice"
""",
        encoding="utf-8",
    )
    found = mutants.untrue(mutants.read(project / "table.toml"), project)
    assert [line.partition(": ")[2].partition(",")[0].partition(";")[0] for line in found] == [
        "there is no such file",
        "is listed 2 times",
        "there is no such mutant",
        "is another mutant now",
        "say why no test can notice it",
    ]


def test_survivors_must_be_listed_and_listed_ones_survive(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = "xamp/room/code.py"
    first, second, third, fourth, *_ = mutants.made([file], project)[file]
    results = mutants_kept.Results(project / "results.json", ["tests/unit"], project)
    for mutant, ended in ((first, "failed"), (second, "passed"), (third, "passed"), (fourth, "failed")):
        results.put(mutant, Result(ended, "tests/unit/room/test_code.py::test_small" if ended == "failed" else ""))
    listed = [mutants.Equivalent(each.identity, each.change, "so") for each in (third, fourth)]
    table = mutants.Table("s", ["tests/unit"], {file: 4}, listed)
    wrong = mutants.report([first, second, third, fourth], table, results)
    assert [line.partition(", ")[0] for line in wrong] == [
        f"{second.identity}: survived",
        f"{fourth.identity}: is listed as equivalent",
    ]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["together", "2", "1", "1", "0"]


def test_a_result_counts_while_module_and_tests_are_the_same(project: Path) -> None:
    file = "xamp/room/code.py"
    first, second, *_ = mutants.made([file], project)[file]

    def known() -> list[bool]:
        mutants_kept._hash_of.cache_clear()
        results = mutants_kept.Results(project / "results.json", ["tests/unit"], project)
        return [results.get(each) is not None for each in (first, second)]

    results = mutants_kept.Results(project / "results.json", ["tests/unit"], project)
    results.put(first, Result("failed", "tests/unit/room/test_code.py::test_small"))
    results.put(second, Result("passed"))
    assert known() == [True, True]
    (project / "tests/unit/room/test_more.py").write_text("", encoding="utf-8")
    assert known() == [True, False]  # the new test might kill the second
    (project / "tests/unit/room/test_more.py").unlink()
    assert known() == [True, True]
    (project / file).write_text(CODE + "\n", encoding="utf-8")
    assert known() == [False, False]
