"""Finds the Python blocks of a page of the docs, and executes them unchanged for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """The Python blocks of ``docs/<page>``. Empty lines before each keep its line numbers those of the page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def run(page: str, names: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """Execute, in ``names``, for each of ``wanted`` the one block of ``docs/<page>`` that contains it."""
    for word in wanted:
        block = [code for code in blocks(page) if word in code]
        assert len(block) == 1, f"{len(block)} blocks of {page} have {word!r}"
        exec(compile(block[0], str(DOCS / page), "exec"), names)
    return names


def recipe() -> dict[str, Any]:
    """``save_checkpoint`` and ``load_checkpoint``, as docs/checkpoints.md has them."""
    return run("checkpoints.md", {}, "def save_checkpoint")
