"""A source file: its bytes, its syntax tree, and where each node stands.

Everything works on the file's text as UTF-8 bytes. Nodes are LibCST's. Code asks for their class by name
(:func:`kind`), so that only this module uses LibCST, and only when a file is parsed.
"""

from __future__ import annotations

import ast
import bisect
import codecs
import contextlib
import dataclasses
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from typing import Any

from xamp.errors import BackendUnavailable, XampError

__all__ = ["LIMIT_LINES", "MissingLibCST", "Node", "Source", "Unreadable", "decode", "kind", "quietly", "text_of"]

Node = Any  # a node of LibCST
LIMIT_LINES = 200_000
_PYTHON_2 = re.compile(
    rb"^\s*(print\s+[\"'\w%]|exec\s+[\"']|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)"
    rb"|\b(async\s*=\s*(True|False)|xrange\()",
    re.M,
)


class Unreadable(XampError, ValueError):
    """A file that cannot be read as Python; the message says why and where."""


class MissingLibCST(BackendUnavailable):
    """LibCST, on which the porter stands, is not installed."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Parse a script's text without what Python says of its escapes: that is for who runs the script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def kind(node: Node) -> str:
    """The name of the node's class, such as ``"Call"``."""
    return type(node).__name__


def decode(data: bytes) -> tuple[str, str, bool]:
    """The text of a Python file.

    Returns:
        The text without a byte order mark, the encoding, and whether there was a mark.

    Raises:
        Unreadable: the file is not text in the encoding that it declares.
    """
    mark = data.startswith(codecs.BOM_UTF8)
    if b"\0" in data:
        raise Unreadable("the file has null bytes: it is no Python source, or it is UTF-16. Save it as UTF-8.")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except (SyntaxError, LookupError, ValueError) as error:
        raise Unreadable(
            f"unknown encoding: {error}. Declare the right one in the first line, or save as UTF-8."
        ) from None
    encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    body = data[3:] if mark else data
    try:
        text = body.decode(encoding)
        same = text.encode(encoding) == body
    except (UnicodeError, LookupError) as error:
        raise Unreadable(
            f"the file is not {encoding}: {error}. Declare its encoding in the first line, or save it as UTF-8."
        ) from None
    if not same:
        raise Unreadable(f"the file does not survive decoding and encoding as {encoding}. Save it as UTF-8.")
    return text, encoding, mark


class Source:
    """One parsed file.

    Attributes:
        data: the text as UTF-8, without a byte order mark.
        tree: the module.
        nodes: all nodes, each before its children.
        newline: the line ending that the file uses most.
    """

    def __init__(self, text: str) -> None:
        try:
            self.data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            line = text.count("\n", 0, error.start) + 1
            raise Unreadable(f"line {line}: half of a pair of surrogates, which no Python file can hold.") from None
        self._starts = [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", self.data))]
        if len(self._starts) > LIMIT_LINES:
            raise Unreadable(
                f"the file has {len(self._starts):,} lines; the porter takes up to {LIMIT_LINES:,}. Split it, or "
                f"exclude it."
            )
        crlf, lf = self.data.count(b"\r\n"), self.data.count(b"\n")
        self.newline = b"\r\n" if crlf * 2 > lf else b"\n" if lf else b"\r" if b"\r" in self.data else b"\n"
        wrapper = _parse(text, self.data)
        self.tree = wrapper.module
        self._spans = _spans(wrapper)
        self._parents: dict[Node, Node] = {}
        self._children: dict[Node, list[Node]] = {}
        self.nodes: list[Node] = []
        self._walk()

    def _walk(self) -> None:
        waiting = [self.tree]
        while waiting:
            node = waiting.pop()
            self.nodes.append(node)
            children = self._children[node] = sorted(_parts(node), key=self._start)
            for child in reversed(children):
                self._parents[child] = node
                waiting.append(child)

    def _start(self, node: Node) -> int:
        return int(self._spans[node].start)

    def children(self, node: Node) -> list[Node]:
        """The nodes in a node, in the order of the text; without spaces, commas and brackets."""
        return self._children[node]

    def parent(self, node: Node) -> Node:
        """The node around ``node``; None for the module."""
        return self._parents.get(node)

    def above(self, node: Node) -> Iterator[Node]:
        """The nodes around ``node``, from the inside out."""
        found = self.parent(node)
        while found is not None:
            yield found
            found = self.parent(found)

    def span(self, node: Node) -> tuple[int, int]:
        """Where the node begins and ends, without its own parentheses."""
        found = self._spans[node]
        return found.start, found.start + found.length

    def code(self, node: Node) -> str:
        """The text of the node."""
        start, end = self.span(node)
        return self.data[start:end].decode("utf-8")

    def line(self, offset: int) -> int:
        """The number, from 1, of the line at ``offset``."""
        return bisect.bisect_right(self._starts, offset)

    def column(self, offset: int) -> int:
        """The column, from 1, in characters."""
        return len(self.data[self._starts[self.line(offset) - 1] : offset].decode("utf-8", "replace")) + 1

    def line_start(self, offset: int) -> int:
        """Where the line at ``offset`` begins."""
        return self._starts[self.line(offset) - 1]

    def text_of_line(self, number: int) -> str:
        """The text of a line, without its ending; empty where there is none."""
        if not 1 <= number <= len(self._starts):
            return ""
        end = self._starts[number] if number < len(self._starts) else len(self.data)
        return self.data[self._starts[number - 1] : end].decode("utf-8", "replace").rstrip("\r\n")

    def next_line(self, offset: int) -> int:
        """Where the line after the one at ``offset`` begins."""
        number = self.line(offset)
        return self._starts[number] if number < len(self._starts) else len(self.data)


def text_of(node: Node) -> str | None:
    """The value of a string without escapes, in any quotes, also after ``u`` or ``r``; None for anything else."""
    if kind(node) != "SimpleString" or "b" in node.prefix.lower() or "\\" in node.value:
        return None
    return str(node.raw_value)


_FIELDS: dict[type, tuple[str, ...]] = {}
_NO_PARTS = (
    "whitespace",
    "lines_",
    "leading",
    "trailing",
    "header",
    "footer",
    "lpar",
    "rpar",
    "comma",
    "semicolon",
    "equal",
)


def _parts(node: Node) -> list[Node]:
    """The nodes in a node that are code; LibCST's own ``children`` copies, which takes long."""
    fields = _FIELDS.get(type(node))
    if fields is None:
        names = [field.name for field in dataclasses.fields(node)]
        fields = _FIELDS[type(node)] = tuple(name for name in names if not name.startswith(_NO_PARTS))
    found = []
    for name in fields:
        value = getattr(node, name)
        if isinstance(value, (list, tuple)):
            found += [each for each in value if hasattr(each, "visit")]
        elif hasattr(value, "visit"):
            found.append(value)
    return found


def _parse(text: str, data: bytes) -> Any:
    try:
        import libcst
        from libcst.metadata import MetadataWrapper
    except ImportError as error:
        raise MissingLibCST(
            f"xamp port needs LibCST, which is not there: {error}. Run: pip install xamp[port]"
        ) from error
    _refuse_too_deep(text)
    try:
        module = libcst.parse_module(text)
        if module.code != text:
            raise Unreadable("the parser does not give this file back as it is; nothing is changed. Please report it.")
        return MetadataWrapper(module, unsafe_skip_copy=True)
    except libcst.ParserSyntaxError as error:
        raise Unreadable(_reason(error, data)) from None
    except RecursionError:
        raise Unreadable("the code is nested too deeply to be read. Exclude the file.") from None


_DEEPEST = 3000
"""The levels that a tree may have. Python 3.11 reads about as many; 3.10 reads more than LibCST's parser survives."""


def _refuse_too_deep(text: str) -> None:
    """Python's own parser fails cleanly where nesting is too deep, or gives a tree; LibCST's may end the process."""
    try:
        with quietly():
            level: list[ast.AST] = [ast.parse(text)]
        for _ in range(_DEEPEST):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise RecursionError
    except (RecursionError, MemoryError):
        raise Unreadable("the code is nested too deeply to be read. Exclude the file.") from None
    except (SyntaxError, ValueError):
        depth = deepest = 0
        for character in text:
            if character in "([{":
                depth += 1
                deepest = max(deepest, depth)
            elif character in ")]}":
                depth -= 1
        if deepest > 500:
            raise Unreadable("the code is nested too deeply to be read. Exclude the file.") from None


def _reason(error: Any, data: bytes) -> str:
    found = re.search(r"error at (\d+):\d+: (.*)", str(error.message))
    line, why = (int(found[1]), found[2]) if found else (error.raw_line, str(error.message).splitlines()[0])
    if _PYTHON_2.search(data):
        return f"line {line}: no Python 3; it looks like Python 2. Convert it first (2to3), then port."
    return f"line {line}: no Python 3 that can be read: {why}"


def _spans(wrapper: Any) -> Any:
    from libcst.metadata import ByteSpanPositionProvider

    try:
        return wrapper.resolve(ByteSpanPositionProvider)
    except RecursionError:
        raise Unreadable("the code is nested too deeply to be read. Exclude the file.") from None
