"""The code blocks of all pages: which are executed, which say why not, and how those of the guides run."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

ELSEWHERE = {
    "docs/apex.md": "tests/unit/docs/test_pages.py",
    "docs/backends.md": "tests/conformance/test_backends_page.py",
    "docs/checkpoints.md": "tests/unit/sessions/test_checkpoint_files.py",
    "docs/debugging.md": "tests/unit/debug/test_debugging_page.py",
    "docs/libraries.md": "tests/libraries/test_integrations_page.py",
    "docs/porting.md": "tests/unit/port/test_porting_page.py",
}
"""Pages whose blocks need more than a guide's names, and the test that executes them."""

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```$(?:\n\n<!-- not run: (.+?) -->)?", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"# not run: ?(.+)")
LANGUAGES = ("python", "sh", "ini", "toml", "json", "yaml", "diff", "", "text")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: its page, its section, its language, its code, and why it is not run (empty: it is)."""

    page: str
    section: str
    language: str
    code: str
    reason: str


def pages() -> list[str]:
    """All pages of the project, by their paths in the checkout."""
    return sorted(["README.md", "README.zh-CN.md", *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))])


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page. Empty lines before the code keep its line numbers those of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        titles = re.findall(r"^##+ (.+)$", re.sub(r"^```.*?^```$", "", text[: found.start()], flags=re.S | re.M), re.M)
        mark = _MARK.match(found[2])
        reason = found[3] or (mark[1] if mark else "")
        code = "\n" * text.count("\n", 0, found.start(2)) + found[2]
        yield Block(page, titles[-1] if titles else "", found[1], code, reason)


def sections(page: str) -> dict[str, list[Block]]:
    """The Python blocks of a page that are to be run: by section in guides and concepts, else those of the page."""
    found: dict[str, list[Block]] = {}
    for block in blocks(page):
        if block.language == "python" and not block.reason:
            whole = Path(page).name == "start.md"
            found.setdefault("" if whole else block.section, []).append(block)
    return found


def run_section(found: list[Block], **names: Any) -> dict[str, Any]:
    """Execute the blocks of a section, one after the other, after the block of docs/guides/index.md."""
    (start,) = (block for block in blocks("docs/guides/index.md") if block.language == "python")
    for block in [start, *found]:
        exec(compile(block.code, block.page, "exec"), names)
    return names


def run_page(page: str, folder: Path) -> None:
    """Execute the blocks of ``page``; those that write a file write it into ``folder``."""
    for found in sections(page).values():
        run_section(found, __name__="__main__", path=str(folder / "checkpoint.pt"), print=lambda *_: None)


def run_on_a_rank(folder: Path, given: list[str]) -> None:
    """Execute pages in a process group of one, as torchrun would start it."""
    import torch
    from torch._C._distributed_c10d import HashStore

    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for page in given:
        run_page(page, folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_on_a_rank(Path(sys.argv[1]), sys.argv[2:])
