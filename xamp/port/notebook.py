"""Notebooks: all code cells are ported as one file, for names of one cell are used in the next."""

from __future__ import annotations

import json
import re
from typing import Any

from xamp.port.engine import Ported, port_text
from xamp.port.source import Unreadable

__all__ = ["port_notebook"]

_MAGIC = re.compile(r"^([ \t]*)([%!?])(.*)$", re.M)
_HIDDEN = "#xamp-magic "
_END = "#xamp-end-of-cell {}"


def port_notebook(data: bytes) -> tuple[bytes, Ported]:
    """Port the code cells of a notebook. Outputs, texts and the layout of the JSON stay.

    Lines for IPython (``%matplotlib``, ``!pip``) are left as they are, and so are cells that start with ``%%``.

    Raises:
        Unreadable: the file is no notebook, or its code is not Python 3.
    """
    try:
        text = data.decode("utf-8")
        book = json.loads(text)
        cells = [cell for cell in book["cells"] if cell["cell_type"] == "code" and not _source(cell).startswith("%%")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"no notebook that can be read: {error!r}") from None
    if any(_HIDDEN in _source(cell) or "#xamp-end-of-cell" in _source(cell) for cell in cells):
        raise Unreadable("the notebook has marks of the porter in its code; remove them.")
    whole = "".join(f"{_hide(_source(cell))}\n{_END.format(number)}\n" for number, cell in enumerate(cells))
    ported = port_text(whole)
    if not ported.changed:
        return data, ported
    rest = ported.text
    for number, cell in enumerate(cells):
        code, mark, rest = rest.partition(f"\n{_END.format(number)}\n")
        if not mark:
            raise Unreadable("the cells of the notebook cannot be told apart after porting; nothing is changed.")
        code = _show(code)
        if code != _source(cell):
            cell["source"] = code.splitlines(keepends=True) if isinstance(cell["source"], list) else code
    return _dump(text, book).encode("utf-8"), ported


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _hide(code: str) -> str:
    """Lines for IPython as comments; a block that had nothing else gets a statement."""
    return _MAGIC.sub(lambda found: f"{found[1]}{_HIDDEN}{found[2]}{found[3]}", code)


def _show(code: str) -> str:
    return re.sub(rf"^([ \t]*){_HIDDEN}", r"\1", code, flags=re.M)


def _dump(text: str, book: Any) -> str:
    """The notebook in the layout that it had."""
    found = re.search(r"\n([ \t]+)\"", text)
    indent = found[1] if found else None
    plain = json.dumps(book, ensure_ascii=text.isascii(), indent=indent, separators=None if indent else (", ", ": "))
    tail = text[len(text.rstrip()) :]
    return plain + tail
