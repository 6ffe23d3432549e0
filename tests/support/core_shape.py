"""Reads out of code what a reader has to hold in the head: attributes, who writes them, imports, and modes by name."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FROZEN = {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "TypedDict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_package() -> Code:
    """Return the code of the package as it is."""
    files = (ROOT / "xamp").rglob("*.py")
    return Code({_module_of(path): path.read_text(encoding="utf-8") for path in files})


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Method(NamedTuple):
    """A function of a module, and the class that it is a method of."""

    module: str
    owner: str
    node: Function

    @property
    def own(self) -> str:
        """What the function calls its object; empty where it has none."""
        args = [*self.node.args.posonlyargs, *self.node.args.args]
        static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in self.node.decorator_list)
        return args[0].arg if self.owner and args and not static else ""

    def __str__(self) -> str:
        return f"{self.owner or self.module}.{self.node.name}"


class Write(NamedTuple):
    """An assignment to an attribute, or its deletion: ``of.name = ...``."""

    of: ast.expr
    name: str


class Code:
    """Modules, by their full names, with what they import and the classes in them.

    Attributes:
        modules: the modules.
        classes: each class, by its full name.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.modules = {name: ast.parse(text) for name, text in sources.items()}
        self.classes: dict[str, ast.ClassDef] = {}
        self._methods: list[Method] = []
        for name, module in self.modules.items():
            self._collect(name, name, "", module)
        self._by_name = {(each.owner or each.module, each.node.name): each for each in self._methods}

    def _collect(self, module: str, prefix: str, owner: str, parent: ast.AST) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                self.classes[f"{prefix}.{node.name}"] = node
                self._collect(module, f"{prefix}.{node.name}", f"{prefix}.{node.name}", node)
            elif isinstance(node, Function):
                self._methods.append(Method(module, owner, node))  # those within it are a part of it
            else:
                self._collect(module, prefix, owner, node)

    def methods(self, packages: Iterable[str]) -> Iterator[Method]:
        """Yield the functions and methods of some packages."""
        chosen = tuple(packages)
        return (each for each in self._methods if is_in(each.module, chosen))

    def function(self, module: str, owner: str, name: str) -> Method | None:
        """Return a function of a module, or a method of the class ``owner``."""
        return self._by_name.get((owner or module, name))

    # ---------------------------------------------------------------- names

    @functools.cache  # noqa: B019  # lives as long as a test
    def imported(self, module: str) -> dict[str, str]:
        """Return what each name stands for that ``module`` imports."""
        found: dict[str, str] = {}
        for node in ast.walk(self.modules[module]):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
            elif isinstance(node, ast.Import):
                found.update({each.asname or each.name.partition(".")[0]: each.name for each in node.names})
        return found

    def class_of(self, module: str, expression: ast.expr | None) -> str:
        """Return the full name of the class of this code that ``expression`` names, or its last name elsewhere."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            expression = ast.parse(expression.value, mode="eval").body
        if isinstance(expression, ast.BinOp):  # X | None
            expression = expression.left
        dotted = ast.unparse(expression) if isinstance(expression, ast.Name | ast.Attribute) else ""
        first, _, rest = dotted.partition(".")
        target = self.imported(module).get(first, f"{module}.{first}") + (f".{rest}" if rest else "")
        return target if target in self.classes else dotted.rpartition(".")[2]

    @functools.cache  # noqa: B019
    def ancestry(self, name: str) -> tuple[str, ...]:
        """Return a class and its bases of this code; of others the last part of the name."""
        if name not in self.classes:
            return (name,)
        module = next(each for each in _prefixes(name) if each in self.modules)
        bases = [self.class_of(module, base) for base in self.classes[name].bases]
        return tuple(dict.fromkeys([name, *(each for base in bases for each in self.ancestry(base))]))

    # ---------------------------------------------------------------- attributes

    @functools.cache  # noqa: B019
    def own_attributes(self, name: str) -> frozenset[str]:
        """Return the attributes that a class declares in its body, or that its methods set."""
        found: set[str] = set()
        for node in self.classes[name].body:
            if ast.unparse(getattr(node, "value", None) or node).startswith("staticmethod("):
                continue  # a method
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(each.id for each in targets if isinstance(each, ast.Name))
        for method in self._methods:
            if method.owner == name:
                found.update(each.name for each in writes(method.node) if is_name(each.of, method.own))
        return frozenset(each for each in found if not each.startswith("__"))

    @functools.cache  # noqa: B019
    def set_attributes(self, name: str) -> frozenset[str]:
        """Return the attributes of a class that it gives a value: a mixin may declare some of the class beside it."""
        if self.is_frozen_record(name):
            return frozenset()
        declared = {*map(_only_declared, self.classes[name].body)}
        written = {w.name for m in self._methods if m.owner == name for w in writes(m.node) if is_name(w.of, m.own)}
        is_record = any("dataclass" in ast.unparse(each) for each in self.classes[name].decorator_list)
        return self.own_attributes(name) - (frozenset() if is_record else declared - written)

    def attributes(self, name: str) -> set[str]:
        """Return the attributes of a class, with those that its bases have."""
        return set().union(*(self.own_attributes(each) for each in self.ancestry(name) if each in self.classes))

    def is_frozen_record(self, name: str) -> bool:
        """Return whether a class is a record without methods that write."""
        frozen = FROZEN.intersection(self.ancestry(name)) or any(
            isinstance(each, ast.Call) and "frozen=True" in ast.unparse(each)
            for each in self.classes[name].decorator_list
        )
        own = [method for method in self._methods if method.owner in self.ancestry(name)]
        return bool(frozen) and not any(is_name(w.of, method.own) for method in own for w in writes(method.node))


def _only_declared(node: ast.stmt) -> str:
    """Return the name that a statement gives a type and no value; empty where it does something else."""
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) and node.value is None else ""


def is_in(module: str, packages: Iterable[str]) -> bool:
    """Return whether ``module`` is one of the packages, or within one."""
    return any(module == each or module.startswith(f"{each}.") for each in packages)


def is_name(expression: ast.expr, name: str) -> bool:
    """Return whether ``expression`` is just ``name``."""
    return isinstance(expression, ast.Name) and bool(name) and expression.id == name


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def writes(node: ast.AST) -> Iterator[Write]:
    """Yield each attribute that ``node`` assigns or deletes, by a statement or by its name in a call."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del):
            yield Write(each.value, each.attr)
        elif isinstance(each, ast.Call) and ast.unparse(each.func) in (
            *("setattr", "delattr", "object.__setattr__", "object.__delattr__"),
        ):
            name = each.args[1]
            yield Write(each.args[0], str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name))


# ---------------------------------------------------------------- writes from outside


def foreign_writes(code: Code, owners: Iterable[str], searched: Iterable[str]) -> list[str]:
    """Return the assignments to attributes of classes in ``owners`` that are in no method of the class itself."""
    step = {name for name in code.classes if is_in(name, owners)}
    known = {attribute for name in step for attribute in code.set_attributes(name)}
    found = []
    for method in code.methods(searched):
        for write in writes(method.node):
            if write.name in known and _is_foreign(code, step, method, write):
                found.append(f"{method}: {ast.unparse(write.of)}.{write.name}")
    return sorted(set(found))


def _is_foreign(code: Code, step: set[str], method: Method, write: Write) -> bool:
    if is_name(write.of, "ctx"):
        return False  # of an autograd function
    if is_name(write.of, method.own):
        bases = [base for base in code.ancestry(method.owner)[1:] if base in step]
        return any(write.name in code.set_attributes(base) for base in bases)
    of = _type_of(code, method, write.of)
    if of and of == method.owner:
        return False
    if of in ("", "Any", "object"):
        return True
    return any(each in step and write.name in code.set_attributes(each) for each in code.ancestry(of))


def _type_of(code: Code, method: Method, expression: ast.expr) -> str:
    """Return the class of ``expression`` as far as annotations and calls of classes tell; else nothing."""
    if not isinstance(expression, ast.Name):
        return ""
    for node in ast.walk(method.node):
        if isinstance(node, ast.arg) and node.arg == expression.id and node.annotation is not None:
            return code.class_of(method.module, node.annotation)
        if isinstance(node, ast.AnnAssign) and is_name(node.target, expression.id):
            return code.class_of(method.module, node.annotation)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for place, each in enumerate(target.elts if isinstance(target, ast.Tuple) else [target]):
                    if is_name(each, expression.id):
                        return _made_by(code, method, node.value, place if each is not target else None)
    return code.imported(method.module).get(expression.id, "")


def _made_by(code: Code, method: Method, value: ast.expr, place: int | None) -> str:
    """Return the class of the ``place``-th of what ``value`` is, a call, or of all of it (None); else nothing."""
    if not isinstance(value, ast.Call):
        return ""
    made = code.class_of(method.module, value.func)
    if made in code.classes:
        return made
    called = _called(code, method, value.func)
    if called is None and isinstance(value.func, ast.Name):
        target = code.imported(method.module).get(value.func.id, f"{method.module}.{value.func.id}")
        called = code.function(target.rpartition(".")[0], "", value.func.id)
    returned = None if called is None else called.node.returns
    if isinstance(returned, ast.Subscript) and isinstance(returned.slice, ast.Tuple) and place is not None:
        returned = returned.slice.elts[place]
    return "" if called is None or returned is None else code.class_of(called.module, returned)


def mere_setters(code: Code, owners: Iterable[str]) -> list[str]:
    """Return the methods that store their arguments and do nothing else."""
    found = []
    for method in code.methods(owners):
        body = [each for each in method.node.body if not _is_text(each)]
        arguments = {each.arg for each in ast.walk(method.node.args) if isinstance(each, ast.arg)} - {method.own}
        if method.own and method.node.name != "__init__" and body and all(_stores(each, arguments) for each in body):
            found.append(str(method))
    return found


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _stores(statement: ast.stmt, arguments: set[str]) -> bool:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not list(writes(statement)):
        return False
    stored = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
    return all(isinstance(each, ast.Name) and each.id in arguments for each in stored)


# ---------------------------------------------------------------- questions


QUESTION = re.compile(r"_*(is|has|may|check)_")
WRITERS = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "update"),
    *("setdefault", "add", "discard", "fill", "sort", "reverse"),
}


def writing_questions(code: Code, packages: Iterable[str]) -> list[str]:
    """Return the functions that are named as questions, and change something besides their own variables."""
    found = []
    for method in code.methods(packages):
        if QUESTION.match(method.node.name) and (what := _changes(code, method, frozenset())):
            found.append(f"{method}: {what}")
    return found


def _changes(code: Code, method: Method, seen: frozenset[str]) -> str:
    """Return what a function changes that is not its own; empty: nothing."""
    own = set(_made_here(method.node))
    for write in writes(method.node):
        if _root(write.of) not in own:
            return f"{ast.unparse(write.of)}.{write.name} = ..."
    for node in ast.walk(method.node):
        if isinstance(node, ast.Global | ast.Nonlocal):
            return ast.unparse(node)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and _root(node) not in own:
            return f"{ast.unparse(node)} = ..."
        if not isinstance(node, ast.Call) or _root(node.func) in own:
            continue
        if isinstance(node.func, ast.Attribute) and _writes_by_name(node.func.attr):
            return ast.unparse(node)
        called = _called(code, method, node.func)
        if called and str(called) not in seen and (what := _changes(code, called, seen | {str(method)})):
            return f"{called.node.name}: {what}"
    return ""


def _made_here(function: Function) -> Iterator[str]:
    """Yield the variables that hold what the function itself has made: a display, or what it called a class for."""
    made = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            called = node.value.func if isinstance(node.value, ast.Call) else None
            is_class = isinstance(called, ast.Attribute) and called.attr[:1].isupper()
            if isinstance(node.value, made) or isinstance(called, ast.Name) or is_class:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name))


def _writes_by_name(name: str) -> bool:
    return name in WRITERS or (name.endswith("_") and not name.endswith("__"))


def _called(code: Code, method: Method, function: ast.expr) -> Method | None:
    """Return the method of the same object that is called."""
    if not isinstance(function, ast.Attribute) or not is_name(function.value, method.own):
        return None
    found = (code.function("", owner, function.attr) for owner in code.ancestry(method.owner))
    return next((each for each in found if each is not None), None)


def _root(expression: ast.expr) -> str:
    while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


# ---------------------------------------------------------------- imports


def imports(code: Code) -> dict[str, set[str]]:
    """Return the modules that each module imports, within functions and for types too."""
    found: dict[str, set[str]] = {}
    for name in code.modules:
        targets: set[str] = set()
        for node in ast.walk(code.modules[name]):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets.update(f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Import):
                targets.update(each.name for each in node.names)
        reached = (next((each for each in _prefixes(target) if each in code.modules), name) for target in targets)
        found[name] = {each for each in reached if each != name}
    return found


def circles(code: Code, packages: Iterable[str]) -> list[list[str]]:
    """Return the groups of modules that import each other, by whatever way within ``packages``."""
    chosen = {name for name in code.modules if is_in(name, packages)}
    graph = {name: targets & chosen for name, targets in imports(code).items() if name in chosen}
    reach = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(each for each in reach[name] if name in reach[each])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def with_its_own(code: Code, package: str) -> list[str]:
    """Return the modules of ``package``, and those that nothing but them imports."""
    graph = imports(code)
    importers = {name: {each for each, targets in graph.items() if name in targets} for name in graph}
    found = {name for name in code.modules if is_in(name, [package])}
    while more := {n for n, by in importers.items() if n not in found and by and by <= found}:
        found |= more
    return sorted(found)


# ---------------------------------------------------------------- modes


def identifiers(code: Code, module: str) -> set[str]:
    """Return the names in the code of a module, but for those that it imports and what is reached through these."""
    imported = code.imported(module)
    found: set[str] = set()
    for node in ast.walk(code.modules[module]):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name) if not _is_path(node, imported):
                found.add(name)
    return found - set(imported)


def _is_path(node: ast.Attribute, imported: Mapping[str, str]) -> bool:
    """Return whether an attribute is what an imported module of xamp has, or torch's ``torch.autograd.graph``."""
    first, *rest = ast.unparse(node).split(".")
    if imported.get(first, "").startswith("xamp."):
        return len(rest) <= 2 and not imported[first].rpartition(".")[2][:1].isupper()
    return ast.unparse(node).startswith("torch.autograd.graph")


def naming(code: Code, modules: Iterable[str], mode: str) -> dict[str, list[str]]:
    """Return the modules that name a mode, and how. ``mode`` is a pattern for a part of a name."""
    found = {name: sorted(filter(re.compile(mode).search, identifiers(code, name))) for name in modules}
    return {name: names for name, names in found.items() if names}
