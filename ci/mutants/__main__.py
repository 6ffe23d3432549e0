"""Runs the mutation gate: see ci/mutants.sh.

Mutants are made from the code as it is (ci/mutants/made.py), so that no list of them becomes untrue. Kept by hand, in
ci/mutants.toml, is which modules are tried, and the mutants that no test can notice, each with the reason.

Why not one of the two tools that there are. mutmut (3.8) puts all mutants of a function behind a wrapper that asks an
environment variable at each call: torch.compile would trace the wrapper, code that looks at frames and signatures would
see it, and what stands outside functions is not mutated. cosmic-ray (8.7) writes each fault into the checkout, starts a
new interpreter for it, which imports torch for seconds, and runs one command for all: no choice of tests. It also
numbers mutants through a whole file, so that one more at the top renames all that follow, and brings 13 packages.
LibCST is not needed either: formatting need not survive, for nobody reads a mutant, and ``ast`` parses in a fiftieth of
its time. So one node is replaced in the text, a fork that has torch and pytest already runs the tests, in a copy of the
tree, and the tests are those that reach the line, the cheapest first.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.mutants.kept import Results, read_killers, write_killers
from ci.mutants.made import Mutant, drawn, mutants_of, spans
from ci.mutants.reach import LIMIT, Choice, Reach, make_map, room_of
from ci.mutants.run import Result, Run, Trees, prepare, run_all

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "ci" / "mutants.toml"
KILLERS = ROOT / "ci" / "mutants" / "killers.tsv"
"""The test that last killed each, so that a checkout without a map tries it first. Made by ``--keep``."""
STATE = ROOT / ".mutants"
_COMMAND = "ci/mutants.sh"


@dataclasses.dataclass(frozen=True)
class Equivalent:
    """A mutant that no test can tell from the code.

    Attributes:
        mutant: its identity.
        change: what it changes, as ``--list`` shows it: an edit of the function may give its number to another one.
        why: the reason.
    """

    mutant: str
    change: str
    why: str


@dataclasses.dataclass(frozen=True)
class Table:
    """What ci/mutants.toml says.

    Attributes:
        seed: by which mutants are drawn.
        tests: the folders and files whose tests the map knows.
        modules: how many mutants of each file.
        also: by file, tests to run after those: of processes, of which the map sees nothing.
        equivalent: those that survive.
    """

    seed: str
    tests: Sequence[str]
    modules: Mapping[str, int]
    equivalent: Sequence[Equivalent] = ()
    also: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def read(path: Path = TABLE) -> Table:
    """Read the table."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    equivalent = [Equivalent(**entry) for entry in found.get("equivalent", ())]
    also = found.get("also", {})
    also = {file: [test for name in names for test in _test_files(name)] for file, names in also.items()}
    return Table(found["seed"], found["tests"], found["modules"], equivalent, also)


def _test_files(name: str) -> list[str]:
    """Return the test files in a folder; any other name alone."""
    inside = sorted((ROOT / name).glob("test_*.py")) if (ROOT / name).is_dir() else []
    return [str(path.relative_to(ROOT)) for path in inside] or [name]


def made(files: Iterable[str], root: Path = ROOT) -> dict[str, list[Mutant]]:
    """Return all mutants of each of ``files``."""
    return {file: mutants_of(file, (root / file).read_text(encoding="utf-8")) for file in files}


def untrue(table: Table, root: Path = ROOT) -> list[str]:
    """Return what is wrong with the table itself, a line for each."""
    named = {*table.modules, *table.also, *(test for tests in table.also.values() for test in tests)}
    problems = [f"{file}: there is no such file" for file in sorted(named) if not (root / file).is_file()]
    present = [file for file in table.modules if (root / file).is_file()]
    homeless = [file for file in present if not room_of(file, root) and file not in table.also]
    problems += [f"{file}: no tests have its name; say in [also] which are about it" for file in homeless]
    files = {each.mutant.partition("::")[0] for each in table.equivalent}
    there = {
        mutant.identity: mutant
        for mutants in made((file for file in files if (root / file).is_file()), root).values()
        for mutant in mutants
    }
    counts = collections.Counter(each.mutant for each in table.equivalent)
    problems += [f"{name}: is listed {count} times" for name, count in counts.items() if count > 1]
    for each in table.equivalent:
        if each.mutant not in there:
            problems.append(f"{each.mutant}: there is no such mutant; take its entry out of [[equivalent]]")
        elif (change := there[each.mutant].change) != each.change:
            problems.append(f"{each.mutant}: is another mutant now, {change!r}, where the entry says {each.change!r}")
        if not each.why.strip():
            problems.append(f"{each.mutant}: say why no test can notice it")
    return problems


# ---------------------------------------------------------------- which ones


def changed_functions(base: str, root: Path = ROOT) -> dict[str, set[str]]:
    """Return the functions of each file of xamp/ that differ from the commit ``base``, by file."""
    names = _git(root, "diff", "--name-only", "--diff-filter=d", base, "--", "xamp").splitlines()
    names += _git(root, "ls-files", "--others", "--exclude-standard", "--", "xamp").splitlines()
    found = {}
    for file in sorted(name for name in names if name.endswith(".py")):
        before = subprocess.run(
            ["git", "show", f"{base}:{file}"], cwd=root, capture_output=True, text=True, check=False
        )
        old = {(span.name, span.digest) for span in spans(before.stdout)}
        new = {(span.name, span.digest) for span in spans((root / file).read_text(encoding="utf-8"))}
        found[file] = {name for name, _ in new - old}
    return found


def where_the_branch_began(root: Path = ROOT) -> str:
    """Return the commit at which this branch left main; HEAD where there is no main."""
    done = subprocess.run(["git", "merge-base", "main", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "HEAD"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def chosen(given: argparse.Namespace, table: Table) -> list[Mutant]:
    """Return the mutants that the command line names."""
    if given.changed is not None:
        functions = changed_functions(given.changed or where_the_branch_began())
        return [
            mutant
            for file, all_of in made(functions).items()
            for mutant in all_of
            if mutant.span.name in functions[file]
        ]
    if given.only is not None:
        file = given.only.partition("::")[0]
        files = [file] if (ROOT / file).is_file() else table.modules
        return [mutant for all_of in made(files).values() for mutant in all_of if given.only in mutant.identity]
    every = made(table.modules)
    mutants = [mutant for file, all_of in every.items() for mutant in drawn(all_of, table.modules[file], table.seed)]
    if given.sample is not None:
        known = {each.mutant for each in table.equivalent}
        seed = given.seed or _git(ROOT, "rev-parse", "HEAD").strip()[:12]
        mutants = drawn((mutant for mutant in mutants if mutant.identity not in known), given.sample, seed)
        print(f"a sample of {len(mutants)}, --seed {seed}")
    return mutants


# ---------------------------------------------------------------- the gate


def run(mutants: Sequence[Mutant], choice: Choice, results: Results, workers: int) -> list[str]:
    """Run ``mutants``, keep their results, and return what is wrong with the tests, a line for each.

    First each runs the test that killed it last time, if any; then those that the map knows. Where these are none, or
    some are gone, it runs those of the module's room.
    """
    left = [*mutants]
    with Trees(choice.root, workers) as trees:
        for decides, tests_of in ((False, choice.last), (True, choice.mapped), (True, choice.of_room)):
            runs = [choice.run(mutant, tests) for mutant in left if (tests := tests_of(mutant))]
            for each, result in run_all(runs, trees):
                if result.killed or (decides and result.ended == "passed"):
                    left.remove(each.about)
                    _say(len(mutants) - len(left), len(mutants), each.about, result)
                    results.put(each.about, result)
        wrong = [f"{mutant.identity}: its tests cannot be run" for mutant in left]
        return wrong + _take_back(mutants, results, trees)


def _take_back(mutants: Sequence[Mutant], results: Results, trees: Sequence[Path]) -> list[str]:
    """Forget what was killed by tests that fail without a fault, too; return these tests."""
    killed: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        found = results.get(mutant)
        if found is not None and found["ended"] == "failed":
            killed.setdefault(found["test"], []).append(mutant)
    wrong = fail_by_themselves(sorted(killed), trees)
    for mutant in (mutant for test in wrong for mutant in killed[test]):
        results.forget(mutant)
    return [f"{test} fails without a fault, too" for test in wrong]


def fail_by_themselves(tests: Sequence[str], trees: Sequence[Path]) -> list[str]:
    """Return those of ``tests`` that do not pass without a fault: what they notice says nothing."""
    if not tests:
        return []
    ((_, together),) = run_all([Run(tests, stop=False)], trees[:1])
    left = sorted({*tests} - {*together.passed})
    return [
        each.tests[0] for each, result in run_all([Run([test]) for test in left], trees) if result.ended != "passed"
    ]


def _say(number: int, of: int, mutant: Mutant, result: Result) -> None:
    what = f"killed by {result.test or result.ended}" if result.killed else f"SURVIVED {len(result.passed)} tests"
    print(
        f"{number:4} of {of}  {result.seconds:5.1f} s  {mutant.identity}  {mutant.change}\n{' ' * 22}{what}", flush=True
    )


def report(mutants: Sequence[Mutant], table: Table, results: Results) -> list[str]:
    """Print a table by module, and return what is wrong, a line for each."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    listed = {each.mutant for each in table.equivalent}
    wrong = []
    for mutant in mutants:
        found = results.get(mutant)
        kind = "not run" if found is None else "killed" if found["killed"] else "survived"
        if kind == "survived" and mutant.identity in listed:
            kind = "equivalent"
        elif kind == "survived":
            wrong.append(f"{mutant.identity}: survived, {mutant.change} (line {mutant.lines.start})")
        elif kind == "killed" and mutant.identity in listed and found is not None:
            wrong.append(
                f"{mutant.identity}: is listed as equivalent, and {found['test'] or found['ended']} notices it"
            )
        counts[mutant.file][kind] += 1
    total = sum(counts.values(), collections.Counter[str]())
    kinds = ("killed", "equivalent", "survived", "not run")
    print(f"{'':40}" + "".join(f"{kind:>12}" for kind in kinds))
    for name, count in [*sorted(counts.items()), ("together", total)]:
        print(f"{name:40}" + "".join(f"{count[kind]:12}" for kind in kinds))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate as the command line says."""
    given = _parser().parse_args(arguments)
    table = read()
    if given.map:
        reach = make_map(sorted(table.modules), table.tests, ROOT, STATE, given.workers)
        reach.write(STATE / "map.json")
        print(f"{len(reach.tests)} tests in {STATE.relative_to(ROOT)}/map.json")
        return 0
    wrong = untrue(table)
    mutants = chosen(given, table)
    if given.list:
        print("\n".join(f"{mutant.identity}\n    line {mutant.lines.start}: {mutant.change}" for mutant in mutants))
        print(f"{len(mutants)} mutants")
    else:
        results = Results(STATE / "results.json", table.tests, ROOT)
        open_ones = [mutant for mutant in mutants if given.again or results.get(mutant) is None]
        if open_ones:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the forks and the copies go, too
            prepare()
            reach = Reach.read(STATE / "map.json")
            if not reach.tests:
                print(
                    f"there is no map, so that what no test notices takes long; {_COMMAND} --map makes one", flush=True
                )
            choice = Choice(reach, ROOT, read_killers(KILLERS), table.also, given.seconds)
            wrong += run(open_ones, choice, results, given.workers)
        if given.keep:
            write_killers((mutant for all_of in made(table.modules).values() for mutant in all_of), results, KILLERS)
        wrong += report(mutants, table, results)
    print("\n".join(wrong))
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="the mutation gate; see ci/mutants.sh")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", type=int, metavar="N", help="N of those that are drawn, chosen by --seed")
    which.add_argument(
        "--changed", nargs="?", const="", metavar="BASE", help="those in functions that differ from BASE"
    )
    which.add_argument("--only", metavar="TEXT", help="those with TEXT in their names")
    which.add_argument("--map", action="store_true", help="note which tests reach which lines")
    parser.add_argument("--seed", help="of the sample, any text; by default the commit")
    parser.add_argument("--list", action="store_true", help="print them, and run none")
    parser.add_argument("--again", action="store_true", help="run those whose result is known, too")
    parser.add_argument("--seconds", type=float, default=LIMIT, metavar="N", help=f"of tests on one ({LIMIT:g})")
    parser.add_argument("--keep", action="store_true", help="write the tests that killed into ci/mutants/killers.tsv")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="how many run at a time (1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
