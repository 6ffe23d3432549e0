"""Makes mutants of a module from its code: each is the module with one small fault. ``__main__`` runs them.

What is changed is one node of the syntax tree; its new text is put in the place of the old one, and all other lines
keep their numbers. Left alone is what no test should hold: annotations, docstrings, the texts of errors and of the
log, ``assert``, ``__all__``, blocks under TYPE_CHECKING, and functions that only declare something.

A mutant's identity is ``file::function::operator::number``: the how-manieth of this operator in this function it is.
So an edit elsewhere, also in the same file, leaves it as it was.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

from ci.mutants.operators import Change, Function, changes_at, children, is_declaration, place_of

__all__ = ["Mutant", "Span", "drawn", "mutants_of", "spans"]


@dataclasses.dataclass(frozen=True)
class Span:
    """A function of a module, or a method; what stands in it belongs to it.

    Attributes:
        name: its qualified name; ``<module>`` for all that stands in no function.
        lines: its line numbers, decorators included.
        digest: a hash of its text.
    """

    name: str
    lines: range
    digest: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module with one fault.

    Attributes:
        file: the path of the module below the root.
        function: the qualified name of the function in which the fault is.
        operator: what kind of fault.
        number: the how-manieth of its kind in the function, from 1.
        change: what it changes, for people: ``old -> new``.
        lines: the line numbers of what is changed.
        span: the function by which the map of tests knows it.
    """

    file: str
    function: str
    operator: str
    number: int
    change: str
    lines: range
    span: Span
    _place: tuple[int, int]
    _text: str

    @property
    def identity(self) -> str:
        """The name of this mutant, also after edits elsewhere."""
        return f"{self.file}::{self.function}::{self.operator}::{self.number}"

    def source(self, text: str) -> str:
        """Return ``text``, the module from which this was made, with the fault."""
        data, (start, end) = text.encode(), self._place
        gone = data[start:end].count(b"\n") - self._text.count("\n")
        new = self._text
        if gone > 0:  # before a bracket that closes, new lines are free
            new = f"{new[:-1]}{chr(10) * gone})" if new.endswith(")") else new + "\n" * gone
        return (data[:start] + new.encode() + data[end:]).decode()


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its lines.

    Args:
        file: its path below the root.
        text: its code.
    """
    walk = _Walk(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    numbers: collections.Counter[tuple[str, str]] = collections.Counter()
    made = []
    for function, span, (operator, node, new) in walk.changes(ast.parse(text)):
        numbers[function, operator] += 1
        (first, start), (last, end) = place_of(node)
        place = starts[first - 1] + start, starts[last - 1] + end
        old = " ".join(text.encode()[slice(*place)].decode().split())
        change = f"{_short(old)} -> {_short(' '.join(new.split()) or 'nothing')}"
        number = numbers[function, operator]
        made.append(Mutant(file, function, operator, number, change, range(first, last + 1), span, place, new))
    return made


def drawn(mutants: Iterable[Mutant], count: int, seed: str) -> list[Mutant]:
    """Return ``count`` of ``mutants`` by lot. One that is added or goes changes no other's lot.

    Args:
        mutants: to draw from.
        count: how many; all where there are fewer.
        seed: any text.
    """

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.identity}".encode()).digest()

    every = list(mutants)
    chosen = {mutant.identity for mutant in sorted(every, key=lot)[:count]}
    return [mutant for mutant in every if mutant.identity in chosen]


def spans(text: str) -> list[Span]:
    """Return the functions and methods of a module, with ``<module>`` first; none that stands in another one."""
    module, *functions = _Walk(text).spans(ast.parse(text))
    within = {number for each in functions for number in each.lines}
    outside = [line for number, line in enumerate(text.splitlines(), 1) if number not in within]
    return [dataclasses.replace(module, digest=_digest(outside)), *functions]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class _Walk:
    """Goes through a module and knows in which function it is."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._seen: collections.Counter[str] = collections.Counter()
        self._module = Span("<module>", range(1, len(self._lines) + 1), "")

    def _named(self, node: ast.AST, scope: tuple[str, ...]) -> tuple[str, ...]:
        """The qualified name of a function or class; the second of one name (a property's setter) says so."""
        name = str(getattr(node, "name", "lambda"))
        path = ".".join((*scope, name))
        self._seen[path] += 1
        return (*scope, name if self._seen[path] == 1 else f"{name}~{self._seen[path]}")

    def _span(self, node: ast.AST, name: str) -> Span:
        assert isinstance(node, Function)
        first = min(each.lineno for each in (node, *node.decorator_list))
        lines = range(first, (node.end_lineno or first) + 1)
        return Span(name, lines, _digest(self._lines[first - 1 : lines.stop - 1]))

    def spans(self, tree: ast.AST, scope: tuple[str, ...] = ()) -> list[Span]:
        """See the function of this name."""
        found = [] if scope else [self._module]
        for node in children(tree):
            if is_declaration(node):
                continue
            if isinstance(node, Function):
                found.append(self._span(node, ".".join(self._named(node, scope))))
            elif isinstance(node, ast.ClassDef):
                found += self.spans(node, self._named(node, scope))
            elif not isinstance(node, ast.expr):
                found += self.spans(node, scope)[0 if scope else 1 :]
        return found

    def changes(
        self, node: ast.AST, scope: tuple[str, ...] = (), span: Span | None = None
    ) -> Iterator[tuple[str, Span, Change]]:
        """Yield each change of ``node`` and of all in it, with the function in which it is."""
        if is_declaration(node):
            return
        inner, own = scope, span
        if isinstance(node, (*Function, ast.ClassDef)):
            inner = self._named(node, scope)
            if span is None and isinstance(node, Function):
                own = self._span(node, ".".join(inner))
        name = ".".join(inner) or "<module>"
        for change in changes_at(node):
            yield name, own or self._module, change
        for child in children(node):
            yield from self.changes(child, inner, own)
