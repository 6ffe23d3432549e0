"""What a rule is, and what it says about a place.

A rule is an object of a subclass of :class:`Rule` with a name, a docstring, examples, and one or both of

    names    a table: dotted path of what is to be replaced -> :class:`Target`
    look     a method that gets each node of the classes in ``kinds``

Other packages add rules by the entry-point group ``xamp.port_rules``: each entry point leads to a list of rules.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

__all__ = ["Example", "Finding", "Grade", "Rule", "Target"]


class Grade(str, enum.Enum):
    """How sure a rule is of a place.

    Attributes:
        CERTAIN: rewritten, and nothing said.
        NEUTRAL: recognised; it runs on every device as it stands.
        NOTED: rewritten or kept, with a comment ``TODO(xamp)`` or a line in the report.
        UNSUPPORTED: left as it is, with a comment; the command's exit code tells of it.
    """

    CERTAIN = "certain"
    NEUTRAL = "neutral"
    NOTED = "noted"
    UNSUPPORTED = "unsupported"


class Target(NamedTuple):
    """What becomes of a name.

    Attributes:
        new: the dotted path to write instead; None: it stays.
        grade: see :class:`Grade`.
        text: what a note says.
        is_module: names below it that the table does not have are unsupported; else they move along.
        imports_only: it is for import statements; other uses are another rule's.
    """

    new: str | None
    grade: Grade = Grade.CERTAIN
    text: str = ""
    is_module: bool = False
    imports_only: bool = False

    @property
    def note(self) -> str:
        """What is said where a name of the table is met; nothing where it is certain."""
        return "" if self.grade is Grade.CERTAIN else self.text


class Example(NamedTuple):
    """A script before and after porting; ``after`` is None where it stays as it is."""

    before: str
    after: str | None = None


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found at one place.

    Attributes:
        rule: the name of the rule.
        grade: see :class:`Grade`.
        line: from 1.
        column: from 1, in characters.
        length: of the place, in characters, up to the end of the line.
        text: the note; empty where nothing is to be said.
        excerpt: the line.
    """

    rule: str
    grade: Grade
    line: int
    column: int
    length: int
    text: str
    excerpt: str


class Rule:
    """The base of all rules. The docstring of a subclass is what ``xamp port --explain`` prints.

    Attributes:
        name: short, in lower case with hyphens.
        grade: the grade of most places.
        met: how many places of 266 real scripts for GPUs the rule meets; documents list rules in this order.
        names: see :class:`Target`.
        kinds: classes of LibCST nodes that :meth:`look` gets.
        examples: before and after; the tests run them.
        unchanged: scripts that the rule must leave alone.
    """

    name: ClassVar[str] = ""
    grade: ClassVar[Grade] = Grade.CERTAIN
    met: ClassVar[int] = 0
    names: ClassVar[Mapping[str, Target]] = {}
    kinds: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[Example, ...]] = ()
    unchanged: ClassVar[tuple[str, ...]] = ()

    def begin(self, work: Any) -> None:
        """Look at the whole file before any node of it, for what the rewriting of imports has to know early."""

    def look(self, node: Any, work: Any) -> None:
        """Look at a node, and say to ``work``, an :class:`xamp.port.work.Work`, what is to be done about it."""
