"""The porting of one file: rules look at it here, and their edits are collected here and spliced in at the end."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from typing import Any

from xamp.port.rule import Finding, Grade, Rule, Target
from xamp.port.scopes import Binding, Ref, Scopes
from xamp.port.source import Node, Source, kind

__all__ = ["Work"]

_KEEP = re.compile(r"#\s*xamp:\s*ignore(?:\[([\w, -]+)\])?")


class Work:
    """What rules may ask, and what they may do.

    Attributes:
        source: the file.
        scopes: its names.
        findings: what rules said so far.
        stays: places that name a device and stay, with the reason; see :mod:`xamp.port.rules.mentions`.
        needs: modules of xamp that edits use -> where the first such edit is.
        aliased: bindings whose import must go on binding the old name.
        kept: bindings whose import stays, for some use of the name must go on asking for CUDA itself.
        root: the name under which the file has xamp.
        own: names of modules that stand beside the file, whatever other package has the name too.
        found: what rules found out about the whole file, by a key of theirs, so that they look through it once.
    """

    def __init__(
        self, source: Source, rules: Iterable[Rule], exports: Iterable[str] = (), own: Iterable[str] = ()
    ) -> None:
        self.source = source
        self.own = frozenset(own)
        self._exports = set(exports)
        self.scopes = Scopes(source)
        self.table: dict[str, tuple[Rule, Target]] = {}
        for rule in rules:
            for path, target in rule.names.items():
                self.table.setdefault(path, (rule, target))
        self.findings: list[Finding] = []
        self.stays: list[Finding] = []
        self.needs: dict[str, int] = {}
        self.aliased: set[Binding] = set()
        self.kept: set[Binding] = set()
        others = [each for each in self.scopes.is_bound("xamp") if (each.path or "").partition(".")[0] != "xamp"]
        self.root = "_xamp" if others else "xamp"
        self.found: dict[str, Any] = {}
        self._edits: list[tuple[int, int, int, bytes]] = []  # start, end, order, new
        self._whole: list[tuple[int, int]] = []
        self._claimed: set[Node] = set()
        self._said: set[tuple[str, str]] = set()
        self._todos: dict[int, list[str]] = {}
        self._told: set[int] = set()
        self._parts: dict[int, int] = {}  # a line -> the one where what it is part of begins

    # asking

    def code(self, node: Node) -> str:
        """The text of a node."""
        return self.source.code(node)

    def parent(self, node: Node) -> Node:
        """The node around it."""
        return self.source.parent(node)

    def resolve(self, node: Node) -> Ref | None:
        """What a chain of names stands for; see :meth:`Scopes.resolve`."""
        return self.scopes.resolve(node) if self.scopes.knows(node) else None

    def path(self, node: Node) -> str:
        """The dotted path that a chain of names stands for; empty where no import is behind it."""
        found = self.resolve(node)
        return found.path if found else ""

    def target(self, path: str) -> tuple[Rule, Target, str] | None:
        """The entry of the longest known start of ``path``: the rule, what becomes of it, and that start."""
        start = path
        while start:
            if start in self.table:
                rule, target = self.table[start]
                if start != path and target.is_module:
                    return rule, Target(None, Grade.UNSUPPORTED, target.text or f"xamp has no {path}"), path
                return rule, target, start
            start = start.rpartition(".")[0]
        return None

    def is_exported(self, name: str) -> bool:
        """Whether other files use the name from this one, or ``__all__`` lists it."""
        if name in self._exports:
            return True
        return any(
            binding.value is not None and re.search(rf"['\"]{re.escape(name)}['\"]", self.code(binding.value))
            for binding in self.scopes.module.names.get("__all__", [])
        )

    def is_claimed(self, node: Node) -> bool:
        """Whether a rule has dealt with the node."""
        return node in self._claimed

    def claim(self, *nodes: Node) -> None:
        """Deal with the nodes: no other rule shall."""
        self._claimed.update(nodes)

    # doing

    def name(self, path: str, at: Node) -> str:
        """How ``path``, such as ``"xamp.device"``, is written at a node; sees to the import."""
        parts = path.split(".")
        module = ".".join(parts[:3]) if parts[:2] == ["xamp", "apex"] and len(parts) > 3 else "xamp"
        if parts[0] == "torch":
            module = ".".join(parts[:-1])
        where = self.source.span(at)[0]
        self.needs[module] = min(where, self.needs.get(module, where))
        return path if parts[0] != "xamp" else ".".join([self.root, *parts[1:]])

    def replace(self, node: Node, new: str) -> None:
        """Write ``new`` in place of the node."""
        self.splice(*self.source.span(node), new)

    def splice(self, start: int, end: int, new: str) -> None:
        """Write ``new`` in place of the bytes from ``start`` to ``end``."""
        if self._covers(start, end):
            return
        self._edits.append((start, end, len(self._edits), new.encode("utf-8")))
        self._tell(start, end)
        if end > start:
            bisect.insort(self._whole, (start, end))

    def _covers(self, start: int, end: int) -> bool:
        at = bisect.bisect_right(self._whole, (start, len(self.source.data) + 1))
        return at > 0 and end <= self._whole[at - 1][1] and start < self._whole[at - 1][1]

    def is_taken(self, node: Node) -> bool:
        """Whether an edit has replaced the node, or what is around it."""
        return self._covers(*self.source.span(node))

    def is_kept(self, rule: Rule, node: Node) -> bool:
        """Whether a comment at the line says to leave it."""
        line = self.source.text_of_line(self.source.line(self.source.span(node)[0]))
        found = _KEEP.search(line)
        return found is not None and (not found[1] or rule.name in re.split(r"[\s,]+", found[1]))

    def say(
        self, rule: Rule, node: Node, grade: Grade, text: str = "", inline: bool = True, once: bool = False
    ) -> None:
        """Put a finding into the report and, with ``inline``, a comment above the statement.

        Args:
            rule: who says it.
            node: the place.
            grade: see :class:`Grade`.
            text: what is to be done by hand; empty for what needs no word.
            inline: whether a comment is to stand in the file.
            once: whether one comment, at the first place, is enough for the file.
        """
        start, end = self.source.span(node)
        into = self.stays if text and grade is Grade.NEUTRAL else self.findings
        into.append(self.found_at(rule, start, end, grade, text))
        if kind(node) not in _BLOCKS:
            first, last = self.source.line(start), self.source.line(max(start, end - 1))
            self._parts.update((line, first) for line in range(first + 1, last + 1) if line not in self._parts)
        if text and inline and not (once and (rule.name, text) in self._said):
            self._todo(start, node, text)
        self._said.add((rule.name, text))

    def found_at(self, rule: Rule, start: int, end: int, grade: Grade, text: str) -> Finding:
        """A finding about the bytes from ``start`` to ``end``."""
        line = self.source.line(start)
        excerpt = self.source.text_of_line(line)
        column = self.source.column(start)
        length = self.source.column(end) - column if self.source.line(end) == line else len(excerpt) + 1 - column
        self._told.add(line)
        return Finding(rule.name, grade, line, column, max(1, length), text, excerpt)

    def _tell(self, start: int, end: int) -> None:
        self._told.update(range(self.source.line(start), self.source.line(max(start, end - 1)) + 1))

    def is_told(self, line: int) -> bool:
        """Whether a rule has said something of a line, or edited it."""
        return line in self._told

    def part_of(self, line: int) -> int | None:
        """The line that tells of a statement or a call to which a line belongs; None where none does."""
        return self._parts.get(line)

    def _todo(self, start: int, node: Node, text: str) -> None:
        statement = self._statement(node)
        at = self.source.line_start(self.source.span(statement)[0] if statement is not None else start)
        said = self._todos.setdefault(at, [])
        if text not in said and not self._stands_above(at, text):
            said.append(text)

    def _stands_above(self, at: int, text: str) -> bool:
        number = self.source.line(at) - 1
        while (line := self.source.text_of_line(number).strip()).startswith("#"):
            if line == f"# TODO(xamp): {text}":
                return True
            number -= 1
        return False

    def _statement(self, node: Node) -> Node | None:
        """The statement whose first line a comment can stand above."""
        found = next((each for each in (node, *self.source.above(node)) if kind(each) in _LINES), None)
        if found is None:
            return None
        line = self.source.line(self.source.span(found)[0])
        for around in self.source.above(found):  # a one-line `if x: y`, or `else: y`
            if kind(around) in _LINES and self.source.line(self.source.span(around)[0]) == line:
                found = around
        return found

    def result(self, extra: Iterable[tuple[int, int, str]] = ()) -> bytes:
        """The file with all edits; ``extra`` come from the care of imports."""
        edits = [(start, 2 + (end > start), order, end, new) for start, end, order, new in self._edits]
        for start, end, text in extra:
            edits.append((start, 0 if start == end else 3, len(edits), end, text.encode("utf-8")))
        data, newline = self.source.data, self.source.newline
        for at, texts in self._todos.items():
            indent = re.match(rb"[ \t\f]*", data[at:])
            space = indent[0] if indent else b""
            comment = b"".join(space + b"# TODO(xamp): " + text.encode() + newline for text in texts)
            edits.append((at, 1, 0, at, comment))
        edits.sort(key=lambda edit: edit[:3])
        out, done = [], 0
        for start, _, _, end, new in edits:
            if start < done:
                continue
            out += [data[done:start], new]
            done = end
        return b"".join([*out, data[done:]])


_BLOCKS = ("If", "For", "While", "With", "Try", "TryStar", "FunctionDef", "ClassDef", "Match")
_LINES = (
    "SimpleStatementLine",
    "If",
    "For",
    "While",
    "With",
    "Try",
    "TryStar",
    "FunctionDef",
    "ClassDef",
    "Match",
    "ExceptHandler",
    "ExceptStarHandler",
    "Else",
    "Finally",
    "MatchCase",
    "Decorator",
)


def arguments(call: Any) -> tuple[list[Any], dict[str, Any], bool]:
    """The plain positional arguments, the keyword ones by name, and whether there are ``*`` or ``**`` ones."""
    plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
    named = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
    return plain, named, any(arg.star for arg in call.args)
