"""Notebooks: all code cells are ported as one file, for names of one cell are used in the next."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from xamp.port.cells import Cell, cells_of, language_of, write
from xamp.port.engine import Ported, port_text
from xamp.port.magics import MARK, Language, file_written, hide, language, run_lines, show
from xamp.port.other.kinds import Kind, kind_of
from xamp.port.other.port import port_lines
from xamp.port.rule import Finding, Grade
from xamp.port.source import Source, Unreadable
from xamp.port.vendor_names import MENTIONS

__all__ = ["port_notebook"]

_OTHER = "a cell of another language"
_HELP = "a question to IPython"
_MAGIC = "a line for IPython, which is not ported; see whether it names a device"
_END = "#xamp-end-of-cell {}"
_MARK_8 = "\ufeff"  # a byte order mark


def port_notebook(data: bytes, last: Callable[[Any], Any] | None = None) -> tuple[bytes, Ported]:
    """Port the code cells of a notebook. Everything but the text of edited cells stays, byte by byte.

    Lines for IPython (``%matplotlib``, ``x = !ls``, ``x?``) are left as they are, and so are cells of another language.
    What runs in a shell (``!pip``, ``%%bash``) is read as a shell script, what ``%%writefile x.py`` writes as a file. A
    cell that cannot be read as Python stays, with a finding.

    Args:
        data: the file.
        last: see :func:`xamp.port.engine.port_text`.

    Raises:
        Unreadable: the file is no notebook, or none of its code is Python 3.
    """
    try:
        text = data.decode("utf-8")
        body = text.removeprefix(_MARK_8)
        cells = cells_of(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no notebook that can be read: {error}") from None
    if language_of(body) not in ("python", "python3", "ipython"):
        return data, Ported(text, False)
    if any(MARK in cell.code or "#xamp-end-of-cell" in cell.code for cell in cells):
        raise Unreadable("the notebook has marks of the porter in its code; remove them.")
    ported = _together(cells, last)
    findings, stays = [*ported.findings], [*ported.stays]
    changed: list[tuple[Cell, str]] = []
    for number, cell in enumerate(cells, 1):
        code, said, more = _alone(cell.code, ported.codes.get(cell, cell.code), number)
        findings += said
        stays += more
        if code != cell.code:
            changed.append((cell, code))
    new = write(body, changed)
    result = Ported(new, bool(changed), tuple(sorted(findings, key=lambda each: each.line)), tuple(stays))
    return (text[: len(text) - len(body)] + new).encode("utf-8") if changed else data, result


@dataclasses.dataclass(frozen=True)
class _Together:
    """What came of the Python cells: the new code of each, and what was found."""

    codes: dict[Cell, str]
    findings: tuple[Finding, ...]
    stays: tuple[Finding, ...]


def _together(cells: Sequence[Cell], last: Callable[[Any], Any] | None) -> _Together:
    """Port the Python cells as one file."""
    python = [cell for cell in cells if language(cell.code) is Language.PYTHON]
    findings: list[Finding] = []
    try:
        ported = port_text(_joined(python), last=last)
    except Unreadable:
        python, findings = _readable(cells)
        ported = port_text(_joined(python), last=last)
    shown, stays = (
        tuple(dataclasses.replace(each, excerpt=show(each.excerpt)) for each in found if MARK not in each.excerpt)
        for found in (ported.findings, ported.stays)
    )  # of lines for IPython _alone tells
    codes: dict[Cell, str] = {}
    rest = ported.text
    for number, cell in enumerate(python):
        code, mark, rest = rest.partition(f"\n{_END.format(number)}\n")
        if not mark:
            raise Unreadable("the cells of the notebook cannot be told apart after porting; nothing is changed.")
        codes[cell] = show(code)
    return _Together(codes, (*findings, *shown), stays)


_Found = list[Finding]


def _alone(before: str, code: str, number: int) -> tuple[str, _Found, _Found]:
    """Port what of a cell is no part of the notebook's Python: lines and cells for a shell, files that it writes."""
    what = language(before)
    findings: _Found = []
    stays: _Found = []

    def keep(ported: Ported) -> str:
        findings.extend(_placed(each, number) for each in ported.findings)
        stays.extend(_placed(each, number) for each in ported.stays)
        return ported.text

    if what is Language.PYTHON:
        new = run_lines(code, lambda line, sets: keep(port_lines(Kind.INI if sets else Kind.SHELL, line)))
        told = {each.excerpt for each in (*findings, *stays)}
        for line in hide(code).split("\n"):
            if MARK in line and MENTIONS.search(line.encode()) and not any(each in line for each in told):
                asks = show(line).strip().startswith("?") or line.rstrip().endswith("?")
                (stays if asks else findings).append(_unread(show(line), number, _HELP if asks else _MAGIC))
        return new, findings, stays
    first, newline, rest = before.partition("\n")
    while first.strip() == "" or first.rpartition("\n")[2].lstrip().startswith("#"):  # above the magic
        more, newline, rest = rest.partition("\n")
        first = f"{first}\n{more}"
    if what is Language.SHELL:
        return f"{first}{newline}{keep(port_lines(Kind.SHELL, rest))}", findings, stays
    named = Kind.CUDA if what is Language.CUDA else kind_of(file_written(before))
    if what is Language.OTHER:
        stays += [_unread(each, number, _OTHER) for each in before.split("\n") if MENTIONS.search(each.encode())]
    elif what is Language.CUDA or named is not Kind.PYTHON:
        return f"{first}{newline}{keep(port_lines(named, rest))}", findings, stays
    else:
        with contextlib.suppress(Unreadable):
            return f"{first}{newline}{keep(port_text(rest))}", findings, stays
    return code, findings, stays


def _unread(line: str, number: int, reason: str) -> Finding:
    grade = Grade.NOTED if reason is _MAGIC else Grade.NEUTRAL
    return Finding("notebook", grade, number, 1, max(1, len(line)), f"code cell {number}: {reason}", line)


def _placed(finding: Finding, number: int) -> Finding:
    text = f"code cell {number}: {finding.text}" if finding.text else ""
    return dataclasses.replace(finding, line=number, text=text)


def _joined(cells: Sequence[Cell]) -> str:
    return "".join(f"{hide(cell.code)}\n{_END.format(number)}\n" for number, cell in enumerate(cells))


def _readable(cells: Sequence[Cell]) -> tuple[list[Cell], list[Finding]]:
    """The cells that can be read, of all code cells, and a finding for each other one that should be Python."""
    kept, findings = [], []
    for number, cell in enumerate(cells, 1):
        if language(cell.code) is not Language.PYTHON:
            continue
        try:
            Source(hide(cell.code) + "\n")
            kept.append(cell)
        except Unreadable as error:
            text = f"code cell {number} stays as it is: {error}"
            first = (cell.code.splitlines() or [""])[0]
            findings.append(Finding("notebook", Grade.UNSUPPORTED, number, 1, max(1, len(first)), text, first))
    if not kept:
        raise Unreadable(findings[0].text if findings else "no code")
    return kept, findings
