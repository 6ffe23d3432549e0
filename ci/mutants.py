"""The mutation gate: makes small faults in modules, one at a time, and runs tests on each. ci/mutants.sh says how.

No tool of the package index serves: cosmic-ray 8.7 numbers mutants through a whole file, where an edit renames them;
mutmut 3.8 makes none outside of functions, and wraps each in what torch.compile would trace.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import functools
import hashlib
import importlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parent.parent
KILLERS = ROOT / "ci" / "mutants.tsv"
_PYTEST = (sys.executable, "-m", "pytest", "-v", "-rE", "--tb=no", "-p", "hypothesispytest", "-p", "no:cacheprovider")
_LINE = re.compile(r"^(?:(.+?)(?: <- .*)? (PASSED|FAILED|ERROR) +\[ *\d+%\]|ERROR (.+?)(?: - .*)?)$", re.MULTILINE)
_FINE, _GONE = (0, 5), 4  # exit codes of pytest: passed, or none collected; no such test

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_PARTS = (ast.Attribute, ast.Subscript)
_PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")
_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITES = [(ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE)]
_NEGATED = dict([*_OPPOSITES, *((second, first) for first, second in _OPPOSITES)])
_SWAP = [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)]
_OTHER: dict[type, Any] = dict([*_SWAP, *((second, first) for first, second in _SWAP)])
_OTHER |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitXor: ast.BitOr}
_OTHER_CALL = {"any": "all", "all": "any", "min": "max", "max": "min"}
_COMMUTATIVE = {"add", "add_", "mul", "mul_", "addcmul", "addcmul_", "maximum", "minimum", "logical_or", "logical_and"}
_KEPT_CALLS = {"isinstance", "issubclass", "cast", "TypeVar", "ParamSpec", "NewType", "assert_never", "getattr"}
_KEPT_CALLS |= {"hasattr", "debug", "info", "warning", "error", "exception", "warn", "log"}
"""Their arguments are left alone: a type checker holds them, or a swap fails at once, or they are texts for people."""
_DECLARES = {"overload", "abstractmethod"}
_NEEDED = {"property", "setter", "deleter", "staticmethod", "classmethod", "dataclass", "contextmanager", "wraps"}
_FASTER = {"final", "override", "cache", "lru_cache", "cached_property", "total_ordering", "runtime_checkable"}
_KEPT_DECORATORS = _NEEDED | _FASTER | _DECLARES
"""Without one of these a module does not work at all, or does the same, only slower."""
_KEPT_KEYWORDS = {"stacklevel", "slots", "frozen", "repr", "strict"}
_KEPT_FIELDS = {"annotation", "returns", "decorator_list", "type_params", "bases"}


class Mutant(NamedTuple):
    """A module with one fault: the how-manieth of an operator in a function, so that an edit elsewhere renames none."""

    file: str
    identity: str  # file::function::operator::number
    change: str  # for people
    line: int
    home: tuple[str, str]  # the name and the text of the function in which it is, or the statement outside of any
    place: tuple[int, int]
    text: str

    def source(self, text: str) -> str:
        """Return ``text``, the module from which this was made, with the fault."""
        data, (start, end) = text.encode(), self.place
        return (data[:start] + self.text.encode() + data[end:]).decode()


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of ``text``, the code of ``file``, in the order of its lines."""
    data = text.encode()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    numbers, names = collections.Counter[str](), collections.Counter[str]()
    made = list[Mutant]()

    def cut(node: Any) -> tuple[int, int]:
        first, column, last, end = node if isinstance(node, tuple) else [getattr(node, name) for name in _PLACE]
        return starts[first - 1] + column, starts[last - 1] + end

    def visit(node: ast.AST, scope: str, home: tuple[str, str], *, within: bool) -> None:
        if isinstance(node, _FUNCTION) and any(_last_name(each) in _DECLARES for each in node.decorator_list):
            return
        if isinstance(node, (*_FUNCTION, ast.ClassDef)):
            scope = f"{scope}.{node.name}".lstrip(".")
            names[scope] += 1
            scope += f"~{names[scope]}" * (names[scope] > 1)  # the second of one name: a property's setter
        if isinstance(node, ast.stmt) and not within:
            first = min([cut(node)[0], *(cut(each)[0] for each in getattr(node, "decorator_list", ()))])
            home, within = (scope, data[first : cut(node)[1]].decode()), isinstance(node, _FUNCTION)
        for operator, old, new in _changes_at(node):
            kind, place = f"{file}::{scope or '<module>'}::{operator}", cut(old)
            numbers[kind] += 1
            code = new if isinstance(new, str) else ast.unparse(new)
            code = f"({code})" if isinstance(new, ast.expr) else code
            words = [" ".join(each.split()) for each in (data[slice(*place)].decode(), code or "nothing")]
            change = " -> ".join(each if len(each) <= 90 else f"{each[:87]}..." for each in words)
            line = data.count(b"\n", 0, place[0]) + 1
            made.append(Mutant(file, f"{kind}::{numbers[kind]}", change, line, home, place, code))
        for child in _children(node):
            visit(child, scope, home, within=within)

    visit(ast.parse(text), "", ("", ""), within=False)
    return made


def drawn(mutants: Iterable[Mutant], count: int, seed: str) -> list[Mutant]:
    """Return ``count`` of ``mutants`` by lot, all where there are fewer. One that is new changes no other's lot."""
    every = list(mutants)
    lots = sorted(every, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.identity}".encode()).digest())
    return sorted(lots[:count], key=every.index)


def _last_name(node: ast.AST) -> str:
    """``b`` of ``b``, ``a.b``, ``a.b()``."""
    node = getattr(node, "func", node)
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_known(test: ast.AST) -> bool:
    names = {_last_name(each) for each in ast.walk(test)}
    return isinstance(test, ast.Constant) or not names.isdisjoint({"TYPE_CHECKING", "version_info"})


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may be changed in ``node``."""
    kept = _KEPT_FIELDS
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return
        case ast.If(test=test) if _is_known(test) and not isinstance(test, ast.Constant):
            kept = _KEPT_FIELDS | {"test", "body"}
        case ast.Call() if _last_name(node) in _KEPT_CALLS:
            return
        case ast.Assign() if any(_last_name(target) in {"__all__", "__slots__"} for target in node.targets):
            return
    values = [value for field, value in ast.iter_fields(node) if field not in kept]
    for child in (child for value in values for child in (value if isinstance(value, list) else [value])):
        if isinstance(child, ast.AST) and getattr(child, "arg", None) not in _KEPT_KEYWORDS:
            yield child


def _has_text_or_row(*nodes: ast.expr) -> bool:
    texts = any(isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes, type(None))) for node in nodes)
    return texts or any(isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) for node in nodes)


def _changes_at(node: ast.AST) -> Iterator[tuple[str, Any, ast.AST | str]]:
    """Yield the changes of ``node`` itself: the operator; what goes, a node or a place; and what comes."""
    match node:
        case ast.Compare():
            for operator, table in (("boundary", _BOUNDARY), ("negated", _NEGATED)):
                for place, old in enumerate(node.ops):
                    if (new := table.get(type(old))) is not None:
                        operators = [*node.ops[:place], new(), *node.ops[place + 1 :]]
                        yield operator, node, ast.Compare(node.left, operators, node.comparators)
        case ast.BoolOp():
            yield "and-or", node, ast.BoolOp(_OTHER[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "not" if isinstance(node.op, ast.Not) else "arithmetic", node, node.operand
        case ast.BinOp() if type(node.op) in _OTHER and not _has_text_or_row(node.left, node.right):
            yield "arithmetic", node, ast.BinOp(node.left, _OTHER[type(node.op)](), node.right)
        case ast.AugAssign():
            if type(node.op) in _OTHER and not _has_text_or_row(node.value):
                yield "arithmetic", node, ast.AugAssign(node.target, _OTHER[type(node.op)](), node.value)
            yield "deleted", node, "pass"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(1 - value if value in (0, 1) else value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, repr(2 * value if 2 * value != value else 1.0)
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not())):
            yield "returned", node, "return True"
            yield "returned", node, "return False"
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "returned", node, "return None"
        case ast.Return(value=None) | ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield "deleted", node, "pass"
        case ast.Assign() | ast.Delete() if all(isinstance(each, _PARTS) for each in node.targets):
            yield "deleted", node, "pass"
        case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
            yield "deleted", node, "pass"
        case ast.If() | ast.IfExp() | ast.While() if not _is_known(node.test):
            for truth in ("(True)", "(False)")[isinstance(node, ast.While) :]:  # such a loop would never end
                yield "forced", node.test, truth
        case ast.comprehension():
            for test in node.ifs:
                yield "forced", test, "(True)"
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_CALL:
            yield "other-call", node.func, _OTHER_CALL[name]
        case ast.Call(args=[first, second, *others]) if _last_name(node) not in _KEPT_CALLS | _COMMUTATIVE:
            if all(isinstance(each, (ast.Name, *_PARTS)) for each in (first, second)):
                yield "swapped", node, ast.Call(node.func, [second, first, *others], node.keywords)
        case ast.With(body=[inner, *_]):  # its body without it, where nothing takes what it yields
            if not any(item.optional_vars for item in node.items) and not getattr(inner, "decorator_list", ()):
                line = f"if True:\n{' ' * inner.col_offset}"
                yield "with", (node.lineno, node.col_offset, inner.lineno, inner.col_offset), line
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            for each in (each for each in node.decorator_list if _last_name(each) not in _KEPT_DECORATORS):
                yield "decorator", (each.lineno, each.col_offset - 1, each.end_lineno, each.end_col_offset), ""


def made(names: Iterable[str]) -> list[Mutant]:
    """Return all mutants of files."""
    return [each for name in names for each in mutants_of(name, (ROOT / name).read_text(encoding="utf-8"))]


def untrue(table: dict[str, Any]) -> list[str]:
    """Return what is wrong with ci/mutants.toml itself, a line for each."""
    also, entries = table["also"], table["equivalent"]
    wrong = [f"{file}: [also] must have tests of it" for file in table["modules"] if not tests_of(file, also)]
    wrong += [f"{name}: is not there" for tests in also.values() for name in tests if not (ROOT / name).exists()]
    there = {each.identity: each.change for each in made({each["mutant"].partition("::")[0] for each in entries})}
    for each in entries:
        change = there.pop(each["mutant"], "none, or one that another entry has")
        if change != each["change"] or not each["why"].strip():
            wrong.append(f"{each['mutant']}: must be {each['change']!r} and have a reason, and is {change!r} now")
    return wrong


def tests_of(file: str, also: dict[str, list[str]]) -> list[list[str]]:
    """Return the tests for ``file``: those that say that they cover it; then all others of its room, and ``also``.

    The room of xamp/scaling/scale.py is tests/unit/scaling. A module at the top has none.
    """
    room = Path(file).parent.relative_to("xamp")
    while room.parts and not (ROOT / "tests" / "unit" / room).is_dir():
        room = room.parent
    module = re.compile(rf"(?<![\w.]){re.escape(file.removesuffix('.py').replace('/', '.'))}(?!\.?\w)")
    first = [name for name, covered in _covered().items() if module.search(covered)]
    names = [name for name in _covered() if room.parts and Path(name).parent == Path("tests/unit", room)]
    others = [name for name in (*names, *also.get(file, ())) if name not in first]
    return [tests for tests in (first, others) if tests]


@functools.cache
def _covered() -> dict[str, str]:
    """Return what each file of unit tests says at its top that it covers."""
    paths = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    tops = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths}
    return {str(path.relative_to(ROOT)): top.partition("Covers:")[2] for path, top in tops.items()}


def chosen(given: argparse.Namespace, table: dict[str, Any]) -> list[Mutant]:
    """Return the mutants that the command line names."""
    modules = table["modules"]
    if given.changed is not None:  # in functions, and in statements outside of any, that differ
        base = given.changed or _git("merge-base", "main", "HEAD").strip() or "HEAD"
        names = _git("diff", "--name-only", "--diff-filter=d", base, "--", "xamp/*.py").splitlines()
        names += _git("ls-files", "--others", "--exclude-standard", "--", "xamp/*.py").splitlines()
        old = {(file, each.home) for file in names for each in mutants_of(file, _git("show", f"{base}:{file}"))}
        return [each for each in made(sorted(names)) if (each.file, each.home) not in old]
    if given.only:
        file = given.only.partition("::")[0]
        return [each for each in made([file] if (ROOT / file).is_file() else modules) if given.only in each.identity]
    mutants = [each for file in modules for each in drawn(made([file]), modules[file], table["seed"])]
    if given.sample:
        seed = given.seed or _git("rev-parse", "HEAD").strip()[:12]
        listed = {each["mutant"] for each in table["equivalent"]}
        mutants = drawn((each for each in mutants if each.identity not in listed), given.sample, seed)
        print(f"a sample of {len(mutants)}, --seed {seed}")
    return mutants


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


class Runner:
    """Runs tests on mutants, each in one of ``workers`` copies of the tree; ``seconds`` say when a run hangs."""

    def __init__(self, folder: Path, workers: int, seconds: float) -> None:
        self._seconds, self._running, self._trees = seconds, set[int](), queue.SimpleQueue[Path]()
        for tree in (folder / str(number) for number in range(workers)):
            there = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
            for name in filter(os.path.lexists, there):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
            self._trees.put(tree)

    def _pytest(self, tree: Path, tests: Iterable[str], *words: str) -> tuple[int, list[str], list[str]]:
        """Return the exit code of pytest, the tests that failed, and those that passed."""
        own = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XAMP_TEST_SEED": "every"}
        env = {**os.environ, **own, "PYTHONPATH": str(tree)}
        with tempfile.TemporaryFile("w+", errors="replace") as out, open(os.devnull) as nothing:
            where: dict[str, Any] = {"cwd": tree, "env": env, "stdin": nothing, "stdout": out, "stderr": out}
            run = subprocess.Popen([*_PYTEST, *words, *tests], start_new_session=True, **where)
            self._running.add(run.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(self._seconds)
            self.end(run.pid)
            out.seek(0)
            found = [(test or file, word) for test, word, file in _LINE.findall(out.read())]
        failed, passed = ([test for test, word in found if (word == "PASSED") is right] for right in (False, True))
        return run.wait(), failed, passed

    def end(self, *children: int) -> None:
        """End these children, or all, with what they started."""
        for child in children or [*self._running]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            self._running.discard(child)

    def judge(self, mutant: Mutant, first: str, then: list[list[str]]) -> tuple[Mutant, tuple[str, ...], int, float]:
        """Run tests until something fails; return that, how many tests passed, and seconds."""
        began, tree, count, killers = time.monotonic(), self._trees.get(), 0, tuple[str, ...]()
        text = (tree / mutant.file).read_text(encoding="utf-8")
        (tree / mutant.file).write_text(mutant.source(text), encoding="utf-8")
        for tests in [[first], *then] if first else then:
            code, failed, passed = self._pytest(tree, tests, "-x")
            count += len(passed)
            if failed or not (code in _FINE or (code == _GONE and tests == [first])):
                killers = tuple(failed[:1] or tests)
                break
        (tree / mutant.file).write_text(text, encoding="utf-8")
        self._trees.put(tree)
        return mutant, killers, count, time.monotonic() - began

    def fail_alone(self, killers: Iterable[tuple[str, ...]]) -> list[str]:
        """Return what of this fails, or hangs, without a fault, too: it kills nothing."""
        tree, single = self._trees.get(), [each[0] for each in killers if len(each) == 1]
        passed = self._pytest(tree, single)[2] if single else []
        left = [each for each in killers if each[0] not in passed]
        return [" ".join(each) for each in left if self._pytest(tree, each)[0] not in _FINE]


def run(mutants: Sequence[Mutant], table: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """Run them all, and return what is wrong, a line for each."""
    last = dict(line.split("\t", 1) for line in KILLERS.read_text(encoding="utf-8").splitlines())
    listed, also = {each["mutant"] for each in table["equivalent"]}, table["also"]
    wrong, killers = list[str](), dict[tuple[str, ...], None]()
    with tempfile.TemporaryDirectory(prefix="xamp-mutants-") as folder, ThreadPoolExecutor(given.workers) as pool:
        runner = Runner(Path(folder), given.workers, given.seconds)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        work = [pool.submit(runner.judge, m, last.get(m.identity, ""), tests_of(m.file, also)) for m in mutants]
        try:
            for number, done in enumerate(as_completed(work), 1):
                mutant, found, passed, seconds = done.result()
                name, is_listed = mutant.identity, mutant.identity in listed
                came = f"killed by {' '.join(found)}" if found else f"SURVIVED {passed} tests"
                print(f"{number:4} of {len(work)} {seconds:6.1f} s  {name}  {mutant.change}\n{'':22}{came}", flush=True)
                if bool(found) is is_listed or not (found or passed):
                    wrong.append(f"{name} (line {mutant.line}), listed as equivalent: {is_listed}, {came}")
                last[name] = found[0] if len(found) == 1 and "::" in found[0] else ""
                killers |= {found: None} if found else {}
            wrong += [f"{each}: fails without a fault, too" for each in runner.fail_alone(killers)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.end()
    if given.keep:
        there = {mutant.identity for mutant in made(table["modules"])}
        lines = [f"{name}\t{test}\n" for name, test in sorted(last.items()) if test and name in there]
        KILLERS.write_text("".join(lines), encoding="utf-8")
    return wrong


def main() -> int:
    """Run the gate as the command line says."""
    parser = argparse.ArgumentParser(description="the mutation gate; see ci/mutants.sh")
    for name, default in {"--sample": 0, "--only": "", "--seed": "", "--seconds": 600.0, "--workers": 1}.items():
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--changed", nargs="?", const="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", action="store_true")
    given, table = parser.parse_args(), tomllib.loads((ROOT / "ci" / "mutants.toml").read_text(encoding="utf-8"))
    wrong, mutants = untrue(table), chosen(given, table)
    if given.list:
        print(*(f"{each.identity}\n    line {each.line}: {each.change}" for each in mutants), sep="\n")
        print(f"{len(mutants)} mutants")
    else:
        wrong += run(mutants, table, given)
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
