"""Notebooks: all code cells are ported as one file, for names of one cell are used in the next."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from xamp.port.engine import Ported, port_text
from xamp.port.magics import MARK, hide, show
from xamp.port.rule import Finding, Grade
from xamp.port.source import Source, Unreadable

__all__ = ["port_notebook"]

_PYTHON = ("time", "timeit", "capture", "prun", "memit", "mprun", "debug", "scalene", "snakeviz")  # %%x of Python code
_END = "#xamp-end-of-cell {}"


def port_notebook(data: bytes, last: Callable[[Any], Any] | None = None) -> tuple[bytes, Ported]:
    """Port the code cells of a notebook. Outputs, texts and the layout of the JSON stay.

    Lines for IPython (``%matplotlib``, ``!pip``, ``x = !ls``, ``x?``) are left as they are, and so are cells of another
    language (``%%bash``). A cell that cannot be read as Python stays, with a finding.

    Args:
        data: the file.
        last: see :func:`xamp.port.engine.port_text`.

    Raises:
        Unreadable: the file is no notebook, or none of its code is Python 3.
    """
    try:
        text = data.decode("utf-8")
        book = json.loads(text)
        coded = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        cells = [cell for cell in coded if _is_python(_source(cell))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"no notebook that can be read: {error!r}") from None
    if any(MARK in _source(cell) or "#xamp-end-of-cell" in _source(cell) for cell in cells):
        raise Unreadable("the notebook has marks of the porter in its code; remove them.")
    try:
        ported = port_text(_joined(cells), last=last)
        findings: list[Finding] = []
    except Unreadable:
        cells, findings = _readable(coded)
        ported = port_text(_joined(cells), last=last)
    shown = tuple(dataclasses.replace(each, excerpt=show(each.excerpt)) for each in ported.findings)
    result = Ported(ported.text, ported.changed, (*findings, *shown))
    if not ported.changed:
        return data, result
    rest = ported.text
    for number, cell in enumerate(cells):
        code, mark, rest = rest.partition(f"\n{_END.format(number)}\n")
        if not mark:
            raise Unreadable("the cells of the notebook cannot be told apart after porting; nothing is changed.")
        code = show(code)
        if code != _source(cell):
            cell["source"] = code.splitlines(keepends=True) if isinstance(cell["source"], list) else code
    return _dump(text, book).encode("utf-8"), result


def _is_python(code: str) -> bool:
    found = re.match(r"%%(\w+)", code)
    return found is None or found[1] in _PYTHON


def _joined(cells: Sequence[Any]) -> str:
    return "".join(f"{hide(_source(cell))}\n{_END.format(number)}\n" for number, cell in enumerate(cells))


def _readable(cells: Sequence[Any]) -> tuple[list[Any], list[Finding]]:
    """The cells that can be read, of all code cells, and a finding for each other one that should be Python."""
    kept, findings = [], []
    for number, cell in enumerate(cells, 1):
        if not _is_python(_source(cell)):
            continue
        try:
            Source(hide(_source(cell)) + "\n")
            kept.append(cell)
        except Unreadable as error:
            text = f"code cell {number} stays as it is: {error}"
            first = (_source(cell).splitlines() or [""])[0]
            findings.append(Finding("notebook", Grade.UNSUPPORTED, number, 1, max(1, len(first)), text, first))
    if not kept:
        raise Unreadable(findings[0].text if findings else "no code")
    return kept, findings


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _dump(text: str, book: Any) -> str:
    """The notebook in the layout that it had."""
    found = re.search(r"\n([ \t]+)\"", text)
    indent = found[1] if found else None
    plain = json.dumps(book, ensure_ascii=text.isascii(), indent=indent, separators=None if indent else (", ", ": "))
    tail = text[len(text.rstrip()) :]
    return plain + tail
