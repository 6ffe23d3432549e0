"""Which package uses which private name of torch, through the modules that adapt to torch: see ci/private_names.py."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from ci.dotted_names import names

__all__ = ["uses", "wing_of"]


def uses(root: pathlib.Path, adapters: Sequence[pathlib.Path], others: Sequence[pathlib.Path]) -> dict[str, set[str]]:
    """Each private name that one of ``adapters`` has -> the packages that use it through the adapter.

    A use is an import of what the adapter binds by it, or an attribute of the adapter.

    Args:
        root: what the paths are below.
        adapters: the modules that name private names.
        others: the modules that may use them.
    """
    bound = {_module(path.relative_to(root)): _bindings(path.read_text(encoding="utf-8")) for path in adapters}
    found: dict[str, set[str]] = {}
    for path in adapters:
        found.update({name: set() for _, name in names(path.read_text(encoding="utf-8"))})
    for path in others:
        for module, binding in _taken(ast.parse(path.read_text(encoding="utf-8")), bound):
            for name in bound[module].get(binding, ()):
                found[name].add(wing_of(path.relative_to(root)))
    return found


def wing_of(path: pathlib.Path) -> str:
    """The package of a file, by its path below the root: a folder or module of xamp/; the emulation is its own."""
    first, *rest = path.with_suffix("").parts
    if first == "backends":
        return "emulation" if rest[:2] == ["npu", "emulation"] else "backends"
    return rest[0]


def _module(path: pathlib.Path) -> str:
    """The dotted name of the module at a path below the root."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "xamp" else ["xamp", *parts])


def _bindings(source: str) -> dict[str, set[str]]:
    """Each name that an adapter binds -> the private names of torch that it stands for, or that its function uses."""
    binds: dict[str, ast.stmt] = {}
    direct: dict[str, set[str]] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom):
            for each in statement.names:
                part = ast.ImportFrom(statement.module, [each], statement.level)
                bound = each.asname or each.name
                binds[bound], direct[bound] = part, {name for _, name in names(ast.unparse(part))}
            continue
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        for bound in _bound(statement):
            binds[bound], direct[bound] = statement, {name for line, name in names(source) if line in lines}

    def reached(bound: str, seen: frozenset[str]) -> set[str]:
        found = set(direct[bound])
        for node in ast.walk(binds[bound]):
            if isinstance(node, ast.Name) and node.id in direct and node.id not in seen:
                found |= reached(node.id, seen | {node.id})
        return found

    return {bound: reached(bound, frozenset({bound})) for bound in binds}


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module binds, if it is no import."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for each in targets if each for node in ast.walk(each) if isinstance(node, ast.Name)]


def _taken(tree: ast.AST, bound: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Adapter and binding, for each that a module takes from an adapter."""
    adapters: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for each in node.names:
            if f"{node.module}.{each.name}" in bound:
                adapters[each.asname or each.name] = f"{node.module}.{each.name}"
            elif node.module in bound:
                yield node.module, each.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in adapters:
            yield adapters[node.value.id], node.attr
