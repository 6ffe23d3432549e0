"""Which name means what, by scope: imports with their aliases, star imports, and what shadows them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from xamp.port.source import Node, Source, kind

__all__ = ["Binding", "Ref", "Scope", "Scopes", "dotted"]

FREE = ("torch", "apex", "torch_npu")  # names that stand for these packages where nothing in the file binds them
_FUNCTIONS = ("FunctionDef", "Lambda")
_COMPREHENSIONS = ("ListComp", "SetComp", "DictComp", "GeneratorExp")


@dataclasses.dataclass(eq=False)
class Binding:
    """One place that gives a name its value.

    Attributes:
        how: ``"import"``, ``"parameter"``, ``"definition"`` or ``"assignment"``.
        path: of an import: the dotted path of what the name stands for.
        node: the ImportAlias, Name, FunctionDef, ClassDef or Param.
        fallback: it only stands in where an import failed: a value set in a handler, or None or False.
        value: of an assignment to the one name: the expression.
    """

    how: str
    path: str | None
    node: Node
    fallback: bool = False
    value: Node | None = None


@dataclasses.dataclass(eq=False)
class Scope:
    """The names of a module, class, function or comprehension."""

    node: Node
    outer: Scope | None
    names: dict[str, list[Binding]] = dataclasses.field(default_factory=dict)
    elsewhere: dict[str, Scope] = dataclasses.field(default_factory=dict)  # by `global` and `nonlocal`
    stars: list[str] = dataclasses.field(default_factory=list)


class Ref(NamedTuple):
    """What a chain of names stands for.

    Attributes:
        path: the dotted path, such as ``"torch.cuda.synchronize"``.
        root: the first name of the chain.
        bindings: what binds the first name.
        certain: nothing else than one import, and stand-ins for it, binds the name.
    """

    path: str
    root: Node
    bindings: tuple[Binding, ...]
    certain: bool


def dotted(node: Node) -> str:
    """The text of a chain of names; empty for anything else."""
    parts: list[str] = []
    while kind(node) == "Attribute":
        parts.append(node.attr.value)
        node = node.value
    if kind(node) != "Name":
        return ""
    parts.append(node.value)
    return ".".join(reversed(parts))


def _root(node: Node) -> Node:
    while kind(node) == "Attribute":
        node = node.value
    return node


class Scopes:
    """All scopes of a file.

    Attributes:
        module: the outermost one.
        uses: by binding, the names that refer to it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.module = Scope(source.tree, None)
        self._all = [self.module]
        self._of: dict[Node, Scope] = {}  # the scope in which a node is evaluated
        self._visit(source.tree)
        self.uses: dict[Binding, list[Node]] = {}
        for node in source.nodes:
            if kind(node) == "Name" and self.is_use(node):
                for binding in self.bindings(node):
                    self.uses.setdefault(binding, []).append(node)

    def resolve(self, node: Node) -> Ref | None:
        """What a Name or a chain of attributes stands for; None where no import is behind it."""
        root = _root(node)
        if kind(root) != "Name":
            return None
        chain = dotted(node)
        bindings = self.bindings(root)
        if not bindings:
            return self._by_star(chain, root)
        imports = [each for each in bindings if each.path]
        imports = [each for each in imports if not each.fallback] or imports
        if not imports:
            return None
        rest = chain[len(root.value) :]
        paths = {each.path for each in imports}
        solid = all(each in imports or each.fallback for each in bindings)
        return Ref(f"{imports[0].path}{rest}", root, tuple(bindings), solid and len(paths) == 1)

    def bindings(self, name: Node) -> list[Binding]:
        """What binds the name, in the nearest scope that does; empty where nothing does."""
        scope: Scope | None = self._of.get(name, self.module)
        text: str = name.value
        first = True
        while scope is not None:
            if text in scope.elsewhere:
                return scope.elsewhere[text].names.get(text, [])
            if text in scope.names and (first or kind(scope.node) != "ClassDef"):
                return scope.names[text]
            scope, first = scope.outer, False
        return []

    @property
    def stars(self) -> list[str]:
        """The modules from which names come by ``import *``."""
        return self.module.stars

    def all_bindings(self) -> list[Binding]:
        """Every binding of every scope."""
        return [binding for scope in self._all for each in scope.names.values() for binding in each]

    def is_bound(self, text: str) -> list[Binding]:
        """All bindings of a name, in any scope."""
        return [binding for scope in self._all for binding in scope.names.get(text, [])]

    def _by_star(self, chain: str, root: Node) -> Ref | None:
        """What a free name stands for: ``torch`` is torch, whoever's star import or notebook brings it."""
        if root.value in FREE:
            return Ref(chain, root, (), True)
        for path in self.module.stars:
            if path.partition(".")[0] in ("apex", "torch"):
                return Ref(f"{path}.{chain}", root, (), False)
        return None

    def is_use(self, name: Node) -> bool:
        """Whether a Name stands for a value; the name of an attribute, keyword or parameter does not."""
        parent = self.source.parent(name)
        where = kind(parent)
        if where == "Attribute":
            return name in self._of and bool(parent.value is name)
        if where in ("Arg", "Param"):
            return parent.keyword is not name if where == "Arg" else parent.name is not name
        return name in self._of and where not in ("AsName", "FunctionDef", "ClassDef")

    # building

    def _visit(self, tree: Node) -> None:
        waiting = [(tree, self.module)]
        while waiting:
            node, scope = waiting.pop()
            self._of[node] = scope
            what = kind(node)
            inner = scope
            if what in _FUNCTIONS or what == "ClassDef" or what in _COMPREHENSIONS:
                if what in ("FunctionDef", "ClassDef"):
                    self._bind(scope, node.name.value, Binding("definition", None, node, self._in_handler(node)))
                inner = Scope(node, scope)
                self._all.append(inner)
            self._note(node, scope)
            for child in reversed(self._evaluated(what, node)):
                waiting.append((child, self._place(what, node, child, scope, inner)))

    def _evaluated(self, what: str, node: Node) -> list[Node]:
        """The children in which names stand for values."""
        if what in ("Import", "ImportFrom"):
            return [child for child in self.source.children(node) if kind(child) == "ImportAlias"]
        return [] if what in ("ImportAlias", "Global", "Nonlocal") else self.source.children(node)

    def _place(self, what: str, node: Node, child: Node, scope: Scope, inner: Scope) -> Scope:
        """The scope of a child: decorators, defaults and bases are evaluated around a function or class."""
        if what == "ClassDef":
            return inner if child is node.body else scope
        if what == "FunctionDef":
            return inner if child is node.body or child is node.params else scope
        if what == "Param" and child is not node.name:
            return scope.outer or scope
        return inner

    def _note(self, node: Node, scope: Scope) -> None:
        what = kind(node)
        if what == "ImportAlias":
            self._import(node, scope)
        elif what == "ImportFrom" and kind(node.names) == "ImportStar" and node.module is not None:
            self.module.stars.append("." * len(node.relative) + dotted(node.module))
        elif what == "Param":
            self._bind(scope, node.name.value, Binding("parameter", None, node))
        elif what in ("Global", "Nonlocal"):
            self._elsewhere(what, node, scope)
        elif what == "Name" and self._is_target(node):
            owner = scope
            while kind(owner.node) in _COMPREHENSIONS and self._is_walrus(node) and owner.outer is not None:
                owner = owner.outer
            value = self._value(node)
            stands_in = self._in_handler(node) or (value is not None and self.source.code(value) in ("None", "False"))
            self._bind(owner, node.value, Binding("assignment", None, node, stands_in, value))

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        scope = scope.elsewhere.get(name, scope)
        scope.names.setdefault(name, []).append(binding)

    def knows(self, node: Node) -> bool:
        """Whether the node is evaluated; names in import statements are not."""
        return node in self._of

    def _import(self, alias: Node, scope: Scope) -> None:
        spare = self._in_handler(alias)
        statement = self.source.parent(alias)
        path = dotted(alias.name)
        asname = alias.asname.name.value if alias.asname is not None and kind(alias.asname.name) == "Name" else None
        if kind(statement) == "ImportFrom":
            start = "." * len(statement.relative) + (dotted(statement.module) if statement.module is not None else "")
            self._bind(scope, asname or path, Binding("import", f"{start}.{path}", alias, spare))
        elif asname:
            self._bind(scope, asname, Binding("import", path, alias, spare))
        else:
            root = path.partition(".")[0]
            self._bind(scope, root, Binding("import", root, alias, spare))

    def _elsewhere(self, what: str, node: Node, scope: Scope) -> None:
        for item in node.names:
            name = item.name.value
            home = self.module
            if what == "Nonlocal":
                outer = scope.outer
                while outer is not None and name not in outer.names:
                    outer = outer.outer
                home = outer or self.module
            scope.elsewhere[name] = home

    def _is_target(self, name: Node) -> bool:
        node, parent = name, self.source.parent(name)
        while kind(parent) in ("Tuple", "List", "Element", "StarredElement"):
            node, parent = parent, self.source.parent(parent)
        what = kind(parent)
        if what in ("AssignTarget", "AugAssign", "AnnAssign", "For", "CompFor", "NamedExpr"):
            return bool(parent.target is node)
        if what == "AsName":
            return kind(self.source.parent(parent)) in ("WithItem", "ExceptHandler", "ExceptStarHandler")
        return what in ("MatchAs", "MatchStar") and parent.name is name

    def _is_walrus(self, name: Node) -> bool:
        return kind(self.source.parent(name)) == "NamedExpr"

    def _value(self, name: Node) -> Node | None:
        parent = self.source.parent(name)
        if kind(parent) == "AssignTarget":
            return self.source.parent(parent).value
        return parent.value if kind(parent) in ("AnnAssign", "NamedExpr") else None

    def _in_handler(self, node: Node) -> bool:
        for around in self.source.above(node):
            if kind(around) in ("ExceptHandler", "ExceptStarHandler"):
                return True
            if kind(around) in ("FunctionDef", "ClassDef", "Lambda"):
                return False
        return False
