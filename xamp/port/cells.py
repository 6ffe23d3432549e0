"""The cells of a notebook, and where the text of each stands in the file, so that only edited text is written anew."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Sequence

__all__ = ["Cell", "cells_of", "language_of", "write"]

_SPACE = re.compile(r"[ \t\n\r]*")
_UNIT = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.S)
_DECODER = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of code.

    Attributes:
        code: its text.
        start: where the value of its source begins in the file.
        end: where it ends.
        pieces: the strings of a list: where each begins and ends; empty where the source is one string.
    """

    code: str
    start: int
    end: int
    pieces: tuple[tuple[int, int], ...]


def language_of(text: str) -> str:
    """The language that a notebook says that its cells are in; Python where it says nothing."""
    try:
        about = json.loads(text)["metadata"]
        named = about.get("kernelspec", {}).get("language") or about.get("language_info", {}).get("name")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "python"
    return str(named or "python").lower()


def cells_of(text: str) -> list[Cell]:
    """The cells of code, in their order.

    Raises:
        ValueError: the text is no JSON, or no notebook.
    """
    found = list(_cells(text, _space(text, 0)))
    if not found and '"cells"' not in text:
        raise ValueError("there are no cells")
    return found


def _cells(text: str, at: int) -> Iterator[Cell]:
    for key, start, _ in _members(text, at):
        if key == "worksheets":  # notebooks of version 3
            for inner, _ in _elements(text, start):
                yield from _cells(text, inner)
        elif key == "cells":
            for inner, _ in _elements(text, start):
                if (cell := _cell(text, inner)) is not None:
                    yield cell


def _cell(text: str, at: int) -> Cell | None:
    kind, source = None, None
    for key, start, end in _members(text, at):
        if key == "cell_type":
            kind = _DECODER.raw_decode(text, start)[0]
        elif key in ("source", "input"):
            source = start, end
    if kind != "code" or source is None:
        return None
    start, end = source
    value = _DECODER.raw_decode(text, start)[0]
    if isinstance(value, str):
        return Cell(value, start, end, ())
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("the source of a cell is no text")
    return Cell("".join(value), start, end, tuple(_elements(text, start)))


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Each key of an object, and where its value begins and ends."""
    if text[at : at + 1] != "{":
        raise ValueError(f"no object at character {at}")
    at = _space(text, at + 1)
    while text[at : at + 1] == '"':
        key, at = _DECODER.raw_decode(text, at)
        at = _space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"no colon at character {at}")
        start = _space(text, at + 1)
        end = _DECODER.raw_decode(text, start)[1]
        yield key, start, end
        at = _next(text, end)


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Where each element of a list begins and ends."""
    if text[at : at + 1] != "[":
        raise ValueError(f"no list at character {at}")
    at = _space(text, at + 1)
    while text[at : at + 1] not in ("]", ""):
        end = _DECODER.raw_decode(text, at)[1]
        yield at, end
        at = _next(text, end)


def _next(text: str, end: int) -> int:
    at = _space(text, end)
    return _space(text, at + 1) if text[at : at + 1] == "," else at


def write(text: str, changed: Sequence[tuple[Cell, str]]) -> str:
    """The notebook with new code in some cells; every other character stays as it is."""
    for cell, code in sorted(changed, key=lambda each: -each[0].start):
        text = f"{text[: cell.start]}{_source(text, cell, code)}{text[cell.end :]}"
    return text


def _source(text: str, cell: Cell, code: str) -> str:
    """The value of a cell's source with new code: strings that stay keep their spelling."""
    ascii_only = text.isascii()
    if not cell.pieces:
        if text[cell.start] == "[":
            return json.dumps(code.splitlines(keepends=True), ensure_ascii=ascii_only)
        return _string(text[cell.start : cell.end], code, ascii_only)
    old = [_DECODER.raw_decode(text, start)[0] for start, _ in cell.pieces]
    spelled = [text[start:end] for start, end in cell.pieces]
    new = re.findall(r"[^\n]*\n|[^\n]+", code)
    joints = [text[end:start] for (_, end), (start, _) in zip(cell.pieces, cell.pieces[1:], strict=False)]
    before, after = text[cell.start + 1 : cell.pieces[0][0]], text[cell.pieces[-1][1] : cell.end - 1]
    joint = joints[0] if joints else f",{before or _gap(text)}"
    parts: list[str] = []
    for _, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        shared = min(b - a, d - c)  # the last lines of what is replaced are those that were edited
        parts += [_string("", each, ascii_only) for each in new[c : d - shared]]
        parts += [_string(spelled[b - shared + n], new[d - shared + n], ascii_only) for n in range(shared)]
    return f"[{before}{joint.join(parts)}{after}]"


def _gap(text: str) -> str:
    """What stands after the commas of a notebook on one line."""
    return "" if re.search(r'[\]"\d],"', text) and not re.search(r'[\]"\d], "', text) else " "


def _string(spelled: str, new: str, ascii_only: bool) -> str:
    """A string of JSON; where it begins and ends as ``spelled`` does, it is spelled like that."""
    units = _UNIT.findall(spelled[1:-1])
    old = [json.loads(f'"{unit}"', strict=False) for unit in units]
    head = start = 0
    while head < len(old) and new.startswith(old[head], start):
        start += len(old[head])
        head += 1
    tail, end = len(old), len(new)
    while tail > head and new.endswith(old[tail - 1], start, end):
        tail -= 1
        end -= len(old[tail])
    middle = "".join(_escaped(each, ascii_only) for each in new[start:end])
    return f'"{"".join(units[:head])}{middle}{"".join(units[tail:])}"'


def _escaped(character: str, ascii_only: bool) -> str:
    lone = "\ud800" <= character <= "\udfff"
    return json.dumps(character, ensure_ascii=ascii_only or lone)[1:-1]
