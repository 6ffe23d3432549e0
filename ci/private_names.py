"""Counts the private names of torch that the package uses; fails where a module that is no adapter has one.

It fails too where the core has more than 50, where the table of these names lacks one or has another, and where the
count in docs/architecture.md is not right; ``--write`` puts it there.

The rule: a private name is a dotted name that begins with ``torch`` and has a later part that begins with one
underscore (two are Python's own). It is found in the code of xamp/ and backends/, not in docstrings and comments,

- as it is written, ``torch._C._x``, also where an import or an assignment gave its beginning another name: after
  ``import torch._C as c``, ``from torch import _C as c`` or ``c = torch._C`` it is ``c._x``;
- as it is looked up, ``sys.modules["torch.x"]._y``;
- as it is imported: ``import torch._x``, ``from torch.y import _x``, ``from torch._y import x``;
- as a text that ``getattr``, ``hasattr``, ``setattr`` or ``delattr`` gets after a dotted name, ``hasattr(torch, "_x")``
- as a text that is such a name and no more, as ``importlib.import_module`` and ``sys.modules`` take it:
  ``"torch._dynamo.trace_rules"``, or ``"torch.utils._device:DeviceContext"``.

A name counts once, as far as it is written: ``torch._C`` and ``torch._C._x`` are two. What xamp itself puts there
(``_xamp...``) does not count, nor do the names that torch_npu adds (``torch.npu``, ``torch.ops.npu``), nor the texts of
tables that say what scripts may contain. Names that begin at an object (``tensor._version``) are not seen.
"""

from __future__ import annotations

import ast
import pathlib
import re
import runpy
import sys
from collections.abc import Mapping, Sequence, Set

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# Paths below the root; what ends in a slash is a folder.
_EMULATED = "backends/npu/emulation/torch_private.py"
ADAPTERS = ("xamp/torch_compat/torch_private/", "backends/torch_private.py", _EMULATED)
TABLE = "xamp/torch_compat/torch_private/names.py"  # of the names, as texts: it uses none
OF_SCRIPTS = ("xamp/run/ages.py", "xamp/port/rules/")
CORE = {"accel", "casting", "contract", "distributed", "onepass", "plans", "policy", "registry", "scaling"}
CORE |= {"sessions", "torch_compat", "values"}
MOST = 50  # names that the core has
_COUNT = re.compile(r"\d+ private names of torch in \d+ modules, \d+ of them in the core")
_BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}
_PRIVATE = re.compile(r"torch(?!\.npu\b|\.ops\.npu\b)(?=.*[.:]_(?!_|xamp))(?:[.:]\w+)+")


class _Names(ast.NodeVisitor):
    """Collects the private names in a module: line number and name, each as often as it stands there."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._stands_for: dict[str, str] = {}

    def _dotted(self, node: ast.AST | None) -> str:
        """What ``node`` is as a dotted name, with its beginning resolved; empty where it is none."""
        match node:
            case ast.Name(id=name):
                return self._stands_for.get(name, name)
            case ast.Attribute(value=value, attr=attr) if owner := self._dotted(value):
                return f"{owner}.{attr}"
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if self._dotted(value) == "sys.modules":
                return key
        return ""

    def _note(self, node: ast.AST, name: str) -> None:
        name = re.sub(r"(\.__\w+__)+$", "", name)
        if _PRIVATE.fullmatch(name):
            self.found.append((getattr(node, "lineno", 0), name.replace(":", ".")))

    def _name(self, target: ast.expr, value: ast.expr | None) -> None:
        """Remember what a variable stands for from here on."""
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            for part, given in zip(target.elts, values, strict=False):
                self._name(part, given)
        elif isinstance(target, ast.Name):
            name = self._dotted(value)
            self._stands_for[target.id] = name if name.startswith("torch.") else target.id

    def visit(self, node: ast.AST) -> None:
        """Note what ``node`` itself is, then what is in it."""
        match node:
            case ast.Import() | ast.ImportFrom(level=0):
                for alias in node.names:
                    name = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                    self._note(node, name)
                    if alias.asname or isinstance(node, ast.ImportFrom):
                        self._stands_for[alias.asname or alias.name] = name
            case ast.Assign(targets=targets):
                self.generic_visit(node)
                for target in targets:
                    self._name(target, node.value)
            case ast.AnnAssign():
                self.generic_visit(node)
                self._name(node.target, node.value)
            case ast.FunctionDef(args=given) | ast.AsyncFunctionDef(args=given) | ast.Lambda(args=given):
                around = self._stands_for
                own = [each.arg for each in ast.walk(given) if isinstance(each, ast.arg)]
                self._stands_for = {**around, **dict(zip(own, own, strict=True))}
                self.generic_visit(node)
                self._stands_for = around
            case ast.Attribute() if name := self._dotted(node):
                self._note(node, name)
            case ast.Call(func=ast.Name(id=name), args=[first, ast.Constant(value=str(text)), *rest]) if (
                name in _BY_TEXT and self._dotted(first)
            ):
                self._note(node, f"{self._dotted(first)}.{text}")
                for each in (*rest, *node.keywords):
                    self.visit(each)
            case ast.Constant(value=str(text)):
                self._note(node, text)
            case _:
                self.generic_visit(node)


def names(source: str) -> list[tuple[int, str]]:
    """Line number and name of each private name of torch in ``source``, each as often as it stands there."""
    found = _Names()
    found.visit(ast.parse(source))
    return found.found


def is_in(path: str, places: Sequence[str]) -> bool:
    """Whether a path below the root is one of ``places``, or in a folder that is."""
    return any(path.startswith(each) if each.endswith("/") else path == each for each in places)


def sources(root: pathlib.Path) -> dict[str, str]:
    """The files that the rule is for, by path below the root; xamp/backends is a link to the other folder."""
    found = [path for folder in ("xamp", "backends") for path in sorted((root / folder).rglob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path for path in found}
    left_out = ("xamp/backends/", TABLE, *OF_SCRIPTS)
    return {name: path.read_text(encoding="utf-8") for name, path in texts.items() if not is_in(name, left_out)}


def misplaced(files: Mapping[str, str]) -> list[str]:
    """A line for each name in a module that is no adapter."""
    return [
        f"{path}:{line}: {name} is private to torch; name it in one of {' '.join(ADAPTERS)}, with a line in {TABLE}"
        for path, text in files.items()
        if not is_in(path, ADAPTERS)
        for line, name in names(text)
    ]


def taken(files: Mapping[str, str]) -> set[str]:
    """Each private name that an adapter has."""
    return {name for path, text in files.items() if is_in(path, ADAPTERS) for _, name in names(text)}


def disagreements(found: Set[str], lines: Set[str]) -> list[str]:
    """What the adapters and the table do not have in common."""
    wrong = [f"{name}: an adapter has it, and {TABLE} no line for it" for name in found - lines]
    return sorted([*wrong, *(f"{name}: {TABLE} has a line for it, and no adapter has it" for name in lines - found)])


def main(words: Sequence[str]) -> int:
    """Checks or writes, as the top of this file says; returns the exit status."""
    table = runpy.run_path(str(ROOT / TABLE))["NAMES"]  # which imports no torch
    files = sources(ROOT)
    found, modules = taken(files), [path for path, text in files.items() if names(text)]
    core = [each.name for each in table if not each.public and not CORE.isdisjoint(each.used_by.split())]
    wrong = [*misplaced(files), *disagreements(found, {each.name for each in table})]
    count = f"{len(found)} private names of torch in {len(modules)} modules, {len(core)} of them in the core"
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in words:
        PAGE.write_text(page := _COUNT.sub(count, page), encoding="utf-8")
    if _COUNT.findall(page) != [count]:
        wrong.append(f"docs/architecture.md must say {count!r}, once: python ci/private_names.py --write")
    if len(core) > MOST:
        wrong.append(f"the core has {len(core)} private names of torch, and at most {MOST} are allowed: take one out")
    print("".join(f"{line}\n" for line in wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
