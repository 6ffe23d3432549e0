"""Every Python block of docs/debugging.md runs, from the first to the last.

Covers: docs/debugging.md, xamp.debug.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docs_blocks
import pytest

from xamp.cli import main

PAGE = "debugging.md"


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for code in docs_blocks.blocks(PAGE):
        exec(compile(code, str(docs_blocks.DOCS / PAGE), "exec"), names)
    told = capsys.readouterr().out
    assert "aten.exp.default in 'scores'" in told
    assert "keep_fp32=['scores']" in told
    assert "All part by the same factor, 3." in told
    assert main(["compare", "right.trace", "wrong.trace", "--html", "compare.html", "--png", "compare.png"]) == 1
    assert "They part at step 0" in capsys.readouterr().out
