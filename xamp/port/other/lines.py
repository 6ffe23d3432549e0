"""A text that is no Python, line by line, with what is said of it and what is to be edited."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

from xamp.port.other.kinds import Kind
from xamp.port.rule import Finding, Grade

__all__ = ["Line", "Lines"]

RULE = "other-files"
ONLY = "one-vendor"

_HASH = (Kind.SHELL, Kind.DOCKER, Kind.MAKE, Kind.VARIABLES, Kind.YAML, Kind.TOML, Kind.INI, Kind.PACKAGES, Kind.CMAKE)
_SLASHES = r"//|/\*|^\s*\*(?![\w(])"
_COMMENTS = {
    **dict.fromkeys(_HASH, re.compile(r"(?:^|(?<=\s))#")),
    Kind.BATCH: re.compile(r"(?i)^\s*(?:@?rem\b|::|#)"),
    Kind.JSON: re.compile(r"^\s*//|(?<=[\s,{])//(?!.*\")"),
    Kind.NATIVE: re.compile(
        rf"{_SLASHES}|^\s*#(?!\s*(?:include|if|elif|else|endif|define|undef|pragma|error|warning))"
    ),
    Kind.CUDA: re.compile(_SLASHES),
    Kind.OTHER: re.compile(r"^\s*(?:#|//|;|--\s|/\*|%)"),
}
_HERE = re.compile(r"(?<!<)<<-?\s*([\"']?)(\w+)\1")
_PRINTS = re.compile(r"(?:^|[;&|({]|\bthen\b|\bdo\b|\belse\b)\s*cat\b[^;|]*<<")
_GOES_ON = re.compile(r"(?<![|])\|(?!\|)|>(?!&)")
_INI = re.compile(r"^\s*;")


@dataclasses.dataclass
class Line:
    """One line.

    Attributes:
        number: from 1.
        start: where it begins in the text.
        text: without its ending.
        end: where its comment begins; its length where it has none.
        ending: the line ending; empty at the end of the text.
        done: parts of it of which all is said, as pairs of columns.
        is_shown: it is part of what a shell script prints with ``cat <<EOT``.
    """

    number: int
    start: int
    text: str
    end: int
    ending: str
    done: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    is_shown: bool = False

    @property
    def code(self) -> str:
        """The line without its comment."""
        return self.text[: self.end]

    def is_done(self, start: int, end: int) -> bool:
        """Whether something is said of the columns from ``start`` to ``end``."""
        return any(low <= start and end <= high for low, high in self.done)


class Lines:
    """The lines of a text.

    Attributes:
        kind: what the file is.
        text: the whole.
        own: names of modules of the project.
        findings: what was said so far.
    """

    def __init__(self, kind: Kind, text: str, own: Collection[str] = ()) -> None:
        self.kind = kind
        self.text = text
        self.own = own
        self.findings: list[Finding] = []
        self._edits: list[tuple[int, int, str]] = []
        self._lines = list(self._split())
        if kind is Kind.SHELL:
            _mark_shown(self._lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def _split(self) -> Iterator[Line]:
        at = 0
        for number, each in enumerate(re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", self.text), 1):
            text = each.rstrip("\r\n")
            yield Line(number, at, text, self._comment(text), each[len(text) :])
            at += len(each)

    def _comment(self, text: str) -> int:
        pattern = _COMMENTS.get(self.kind)
        if self.kind is Kind.INI and _INI.match(text):
            return 0
        for found in pattern.finditer(text) if pattern is not None else ():
            if not is_quoted(text, found.start()):
                return found.start()
        return len(text)

    def say(self, line: Line, span: tuple[int, int], grade: Grade, text: str, rule: str = RULE) -> None:
        """Put a finding into the report. No comment goes into the file.

        Args:
            line: where.
            span: the columns, from 0.
            grade: see :class:`Grade`.
            text: what is to be done, or why nothing is.
            rule: the rule's name.
        """
        line.done.append(span)
        low, high = span
        self.findings.append(Finding(rule, grade, line.number, low + 1, max(1, high - low), text, line.text))

    def insert(self, line: Line, column: int, new: str) -> None:
        """Write ``new`` into a line."""
        self.replace(line, (column, column), new)

    def replace(self, line: Line, span: tuple[int, int], new: str) -> None:
        """Write ``new`` in place of the columns of ``span``."""
        self._edits.append((line.start + span[0], line.start + span[1], new))

    def add_below(self, line: Line, new: str) -> None:
        """Write ``new`` as a line of its own below ``line``."""
        after = line.start + len(line.text) + len(line.ending)
        common = next((each.ending for each in self._lines if each.ending), "\n")
        self._edits.append((after, after, f"{new}{line.ending}" if line.ending else f"{common}{new}"))

    def has_beside(self, line: Line, column: int, word: str) -> bool:
        """Whether a word stands in a line, or at the same place of one of the three above and below it."""
        near = self._lines[max(0, line.number - 4) : line.number + 3]
        return word in line.text or any(each.text.startswith(f"{line.text[:column]}{word}") for each in near)

    def result(self) -> str:
        """The text with all edits."""
        out, done = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            out += [self.text[done:start], new]
            done = end
        return "".join([*out, self.text[done:]])


def _mark_shown(lines: list[Line]) -> None:
    """Mark the lines that ``cat`` prints; what goes into a file, or to another program, may be a script."""
    end, is_shown = "", False
    for line in lines:
        if end:
            if line.text.strip() == end:
                end = ""
            else:
                line.is_shown = is_shown
        elif (found := _HERE.search(line.code)) is not None:
            end = found[2]
            is_shown = _PRINTS.search(line.code) is not None and _GOES_ON.search(line.code) is None


def is_quoted(text: str, at: int) -> bool:
    """Whether a column stands inside of quotes that open in the same line."""
    quote = ""
    before = ""
    for character in text[:at]:
        if before == "\\" and quote != "'":
            before = ""
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        before = character
    return bool(quote)
