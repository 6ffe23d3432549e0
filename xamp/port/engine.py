"""Ports the text of one file. Nothing of it is executed or imported."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from xamp.port import names
from xamp.port.imports import rewrite_imports
from xamp.port.rule import Finding, Grade, Rule
from xamp.port.rules import load
from xamp.port.rules.mentions import sweep
from xamp.port.source import Source, Unreadable, decode, kind, quietly
from xamp.port.vendor_names import NAMES
from xamp.port.work import Work

__all__ = ["Ported", "port_bytes", "port_text"]

# A file without any of these words, and without what vendor_only names, has nothing to port, and is not parsed.
_WORDS = re.compile(
    rb"npu|hccl|\bamp\b|autocast|GradScaler|torch\.load|DataParallel|[sS]caler|deepspeed|lightning|accelerate|horovod|"
    rb"cpp_extension|pin_memory|torch\.accelerator|amp_C|_C\b|_ext\b|channels_last|fork_rng|set_default_tensor_type",
)


@dataclasses.dataclass(frozen=True)
class Ported:
    """What came of a file.

    Attributes:
        text: the file after porting.
        changed: whether it differs from before.
        findings: what rules said, in the order of lines.
        stays: the other lines that name a device, with the reason why each stays.
    """

    text: str
    changed: bool
    findings: tuple[Finding, ...] = ()
    stays: tuple[Finding, ...] = ()

    def count(self, grade: Grade) -> int:
        """The number of findings of a grade."""
        return sum(finding.grade is grade for finding in self.findings)


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[Rule, ...]:
    return tuple(load())


def port_text(
    text: str,
    rules: Sequence[Rule] | None = None,
    last: Callable[[Work], Any] | None = None,
    exports: Sequence[str] = (),
    own: Collection[str] = (),
) -> Ported:
    """Port a Python file.

    Args:
        text: the file, without a byte order mark.
        rules: the rules; None: xamp's, and those of installed packages.
        last: looks at the file after the rules, and may edit too (``--add-amp``).
        exports: names that other files take from this one; they stay bound.
        own: names of modules that stand beside the file.

    Raises:
        Unreadable: the text is not Python 3.
        MissingLibCST: LibCST is not installed.
        PolicyError: a rule of another package cannot be loaded.
    """
    rules = _loaded() if rules is None else rules
    data = text.encode("utf-8", "surrogatepass")
    if last is None and not _WORDS.search(data) and not NAMES.search(data):
        return Ported(text, False)
    source = Source(text)
    work = Work(source, rules, exports, own)
    by_kind: dict[str, list[Rule]] = {}
    for rule in rules:
        for each in rule.kinds:
            by_kind.setdefault(each, []).append(rule)
    for rule in rules:
        rule.begin(work)
    renamed = names.choose_forms(work)
    for node in source.nodes:
        what = kind(node)
        for rule in by_kind.get(what, ()):
            rule.look(node, work)
        if what in ("Name", "Attribute") and work.scopes.knows(node):
            names.rename(work, node, renamed)
    if last is not None:
        last(work)
    extra = rewrite_imports(work, renamed)
    sweep(work)
    new = work.result(extra).decode("utf-8")
    _check_result(text, new)
    findings, stays = (
        tuple(sorted(each, key=lambda one: (one.line, one.column))) for each in (work.findings, work.stays)
    )
    return Ported(new, new != text, findings, stays)


def _check_result(text: str, new: str) -> None:
    """Refuse a result that is no Python where ``text`` is: a rule met a form that nobody thought of."""
    with quietly():
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # LibCST reads what this Python does not
        try:
            ast.parse(new)
        except SyntaxError as error:
            raise Unreadable(
                f"porting would leave no valid Python at line {error.lineno}; nothing was changed. Please report the "
                "line, or put '# xamp: ignore' on it."
            ) from None


def port_bytes(
    data: bytes,
    rules: Sequence[Rule] | None = None,
    last: Callable[[Work], Any] | None = None,
    exports: Sequence[str] = (),
    own: Collection[str] = (),
) -> tuple[bytes, Ported]:
    """Port a file as it is on the disk; keep its encoding, byte order mark and line endings.

    Raises:
        Unreadable: the bytes are not Python 3 in their encoding.
        MissingLibCST: LibCST is not installed.
    """
    text, encoding, mark = decode(data)
    ported = port_text(text, rules, last, exports, own)
    new = ported.text.encode(encoding)
    return (data[:3] if mark else b"") + new if ported.changed else data, ported
