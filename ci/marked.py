"""Tables in Markdown, and pages of which a script makes the part between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    body = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    return "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n" + body


def placed(page: str, mark: str, body: str, script: str) -> str:
    """``page`` with ``body`` between the marks of ``script``.

    Raises:
        ValueError: the marks are not there.
    """
    start, end = f"<!-- {mark}: made by {script} -->\n", f"<!-- end of {mark} -->\n"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the marks {start.strip()} and {end.strip()} are not there")
    return f"{before}{start}\n{body}\n{end}{after}"
