"""The output of ``xamp policy``: a survey, or the differences between two, as aligned text for a person."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from xamp.casting.ops import UNKNOWN
from xamp.cli._policy_diff import Diff
from xamp.cli._policy_file import Saved

__all__ = ["WIDTH", "render_diff", "render_show"]

WIDTH = 118
"""Columns that the tables need. On a narrower terminal, ``show`` leaves out columns that follow from the others, and
``diff`` prints the two sides one below the other."""

_LEAST = 80
_NAME = 27  # columns for a name on a narrow terminal; a longer name gets its own line
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", UNKNOWN: "?"}
_LEGEND = (
    ("table", "the rule of the portable table; why: the note below"),
    ("device", "the rule of the device's own list, none where that does not have the overload"),
    (
        "fp32 ...",
        "dtype of the result for fp32 inputs, for lower ones, for both in one call, and for lower ones with the lower "
        "dtype named for the result; a slash where it depends on the call",
    ),
    ("computed, *", "from the table: not observed"),
)
_SOURCES = {"called": "", "fake": "", "table": "computed", UNKNOWN: "not seen"}
_HEAD = ("overload", "table", "device", "xamp adds", "fp32", "lower", "mixed", "named", "", "why")
_NARROW = ("overload", "table", "device", "fp32 ...", "why")

Cells = Sequence[str]


def render_show(found: Saved, width: int = WIDTH) -> str:
    """Format what ``xamp policy show`` found as text for a person; rows that differ come first."""
    width = max(_LEAST, min(width, WIDTH))
    parts = (_heading, _groups, _device_only, _summary)
    return "\n".join(line for part in parts for line in part(found, width))


def render_diff(found: Diff, width: int = WIDTH) -> str:
    """Format what ``xamp policy diff`` found as text for a person; what matters most comes first."""
    width = max(_LEAST, min(width, WIDTH))
    parts = (_sides, _differences, _expected, _unknown, _only_rows, _only_entries, _result)
    return "\n".join(line for part in parts for line in part(found, width))


def _heading(found: Saved, width: int) -> Iterator[str]:
    yield f"{found['device']}, {found['op_policy']} policy, lower dtype {found['dtype']}"
    yield from _wrapped(f"torch {found['torch']}, xamp {found['xamp']}; {_how_seen(found)}", width)
    yield ""
    for term, meaning in _LEGEND:
        yield from _wrapped(meaning, width, f"  {term:<11}  ")


def _how_seen(found: Saved) -> str:
    return "by calls on the device" if found["present"] else "the device is not here: by its list and fake tensors"


def _groups(found: Saved, width: int) -> Iterator[str]:
    reasons = list(dict.fromkeys(row["reason"] for row in found["rows"]))
    rows = {title: [row for row in found["rows"] if _group_of(row) == title] for title in _TITLES}

    def drawn(head: Cells, cells: Callable[[Saved, list[str]], Cells]) -> tuple[dict[str, list[Cells]], list[int]]:
        lines = {title: [cells(row, reasons) for row in group] for title, group in rows.items()}
        return lines, _widths([head, *(cells for group in lines.values() for cells in group)])

    head: Cells = _HEAD
    align, (lines, widths) = _aligned, drawn(head, _cells)
    if width < WIDTH or not _fit(widths, width):
        head, align, (lines, widths) = _NARROW, _aligned_narrow, drawn(_NARROW, _narrow_cells)
    for title, group in lines.items():
        if group:
            yield f"\n{title}: {len(group)}"
            yield from (align(cells, widths) for cells in (head, *group))
            for why in sorted({row["cannot"] for row in rows[title] if row["cannot"]}):
                yield from _wrapped(f"{found['device']}: {why}", width, "  ")
    yield "\nwhy"
    for number, reason in enumerate(reasons, 1):
        yield from _wrapped(reason, width, f"  {number:>2}  ")


_DIFFERS, _CANNOT, _UNSEEN, _ADDED, _ALIKE = _TITLES = (
    "differs from the table",
    "cannot be equalised",
    "not to be seen here",
    "as the table, by an entry of xamp's",
    "as the table, without one",
)


def _group_of(row: Saved) -> str:
    """The title of the group that a row belongs to."""
    if row["cannot"]:
        return _CANNOT
    if row["agrees"] is False:
        return _DIFFERS
    if row["agrees"] is None:
        return _UNSEEN
    return _ADDED if row["added"] else _ALIKE


def _cells(row: Saved, reasons: list[str]) -> Cells:
    what = [row["overload"], row["rule"], row["native"], row["added"] or "-"]
    source = "" if row["cannot"] else _SOURCES.get(row["source"], row["source"])
    return [*what, *map(_short, row["results"].values()), source, str(reasons.index(row["reason"]) + 1)]


def _narrow_cells(row: Saved, reasons: list[str]) -> Cells:
    """The cells on a narrow terminal: the device's rule only where it differs from the table's; not what xamp adds.

    What xamp adds is the table's rule, and the title of the group says that xamp adds it.
    """
    overload, table, device, _, *results, source, why = _cells(row, reasons)
    told = "same" if device == table else device
    return [overload, table, told, " ".join(results), why + "*" * (source == _SOURCES["table"])]


def _device_only(found: Saved, width: int) -> Iterator[str]:
    names = found["device_only"]
    if names:
        yield f"\nonly in the list of {found['device']}, and left as they are: {len(names)}"
        yield from _wrapped(", ".join(names), width, "  ")


def _summary(found: Saved, width: int) -> Iterator[str]:
    yield ""
    count = Counter(map(_group_of, found["rows"]))
    computed = sum(row["source"] == "table" for row in found["rows"])
    parts = [f"{count[title]} {title}" for title in _TITLES if count[title]]
    yield from _wrapped(
        f"{len(found['rows'])} overloads in the table: {'; '.join(parts)}. {computed} computed rather than observed. "
        f"{len(found['device_only'])} entries of the device that the table does not govern.",
        width,
    )


def _sides(found: Diff, width: int) -> Iterator[str]:
    a, b = found["a"], found["b"]
    yield f"{a['op_policy']} policy, lower dtype {a['dtype']}"
    for name, side in zip(_names(found), (a, b), strict=True):
        yield from _wrapped(f"torch {side['torch']}, xamp {side['xamp']}; {_how_seen(side)}", width, f"  {name}: ")


def _names(found: Diff) -> tuple[str, str]:
    """The names of the two sides: their device types, with a letter where the device types are the same."""
    a, b = found["a"]["device"], found["b"]["device"]
    return (a, b) if a != b else (f"A ({a})", f"B ({b})")


def _differences(found: Diff, width: int) -> Iterator[str]:
    yield f"\ndifferences: {len(found['differences'])}"
    yield from _side_by_side(found, found["differences"], width)


def _expected(found: Diff, width: int) -> Iterator[str]:
    if found["expected"]:
        yield f"\nexpected, since one of the two cannot equalise it: {len(found['expected'])}"
        yield from _side_by_side(found, found["expected"], width)


def _side_by_side(found: Diff, rows: list[Diff], width: int) -> Iterator[str]:
    """One line per overload; each side shows its rule, then its results, such as ``none: fp32 fp16 -``."""
    if not rows:
        return
    names = _names(found)
    lines: list[Cells] = [("overload", "table", *names, "")]
    lines += [
        (row["overload"], row["a"]["rule"], _side_text(row["a"]), _side_text(row["b"]), row.get("why", ""))
        for row in rows
    ]
    widths = _widths(lines)
    if _fit(widths, width):
        yield from (_aligned(cells, widths) for cells in lines)
    else:
        first, last = max(map(len, names)), widths[0]
        for overload, table, a, b, why in lines[1:]:
            yield f"  {overload:<{last}}  {table}".rstrip()
            for name, told in zip((*names, "why"), (a, b, why), strict=True):
                yield from _wrapped(told, width, f"    {name:<{first}}  ") if told else ()
    yield from _wrapped(
        "each: rule of the device, + what xamp adds: result of fp32, of lower, of mixed inputs, with a dtype named",
        width,
        "  ",
    )


def _side_text(row: Saved) -> str:
    results = [_short(result) for result in row["results"].values()]
    added = f" + {row['added']}" if row["added"] else ""
    seen = ", computed" if row["source"] == "table" else ""
    return f"{row['native']}{added}: {' '.join(results) if set(results) != {'-'} else 'no kernel'}{seen}"


def _unknown(found: Diff, width: int) -> Iterator[str]:
    if found["unknown"]:
        yield f"\nnot to be told, since one of the two does not show it: {len(found['unknown'])}"
        yield from _wrapped(", ".join(found["unknown"]), width, "  ")


def _only_rows(found: Diff, width: int) -> Iterator[str]:
    for name, side in zip(_names(found), "ab", strict=True):
        if found["rows"][side]:
            yield f"\nonly in the table of {name}: {len(found['rows'][side])}"
            yield from _wrapped(", ".join(found["rows"][side]), width, "  ")


def _only_entries(found: Diff, width: int) -> Iterator[str]:
    for name, side in zip(_names(found), "ab", strict=True):
        if found["device_only"][side]:
            yield f"\nonly in the list of {name}, not governed by the table: {len(found['device_only'][side])}"
            yield from _wrapped(", ".join(found["device_only"][side]), width, "  ")


def _result(found: Diff, width: int) -> Iterator[str]:
    a, b = found["device_only"]["a"], found["device_only"]["b"]
    verdict = (
        "different"
        if not found["equal"]
        else "no difference but the expected"
        if found["expected"]
        else "no difference"
    )
    yield ""
    yield from _wrapped(
        f"{verdict}: {found['same']} overloads alike, "
        f"{len(found['differences'])} different, {len(found['expected'])} expected, {len(found['unknown'])} not to be "
        f"told; entries of one list only: {len(a)} and {len(b)}",
        width,
    )


def _short(result: str | None) -> str:
    """``"float16/float32"`` as ``"fp16/fp32"``."""
    return "-" if result is None else "/".join(_SHORT.get(part, part) for part in result.split("/"))


def _widths(lines: Iterable[Cells]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _fit(widths: list[int], width: int) -> bool:
    """Return whether a line of columns as wide as ``widths``, with two spaces before each, is within ``width``."""
    return sum(widths) + 2 * len(widths) <= width


def _aligned(cells: Cells, widths: list[int]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True) if width)
    return ("  " + "  ".join(padded)).rstrip()


def _aligned_narrow(cells: Cells, widths: list[int]) -> str:
    """A line with one space between its cells. A name that is too long for its column gets its own line."""
    name, *rest = cells
    padded = [f"{name:<{_NAME}}", *(f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=True))]
    line = " ".join(padded) if len(name) <= _NAME else " ".join([f"{name}\n  {'':{_NAME}}", *padded[1:]])
    return f"  {line}".rstrip()


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
