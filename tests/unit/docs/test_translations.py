"""The pages in Chinese follow the English ones: the same headings, tables, lists, blocks and pictures.

Covers: docs/zh/*.md.
"""

from __future__ import annotations

import re

from docs_pages import ROOT
from gathering import cases

PAIRS = {
    "README.md": "README.zh-CN.md",
    "docs/start.md": "docs/zh/start.md",
    "docs/concepts.md": "docs/zh/concepts.md",
    "docs/guides/fp8.md": "docs/zh/fp8.md",
    "docs/guides/gpu-npu.md": "docs/zh/porting.md",
    "docs/ascend.md": "docs/zh/ascend.md",
}


def shape(page: str) -> dict[str, list[str]]:
    """What a translation must share with its original."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {
        "headings": re.findall(r"^(#+) ", prose, re.MULTILINE),
        "blocks": re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE),
        "commands": re.findall(r"^    \S.*$", prose, re.MULTILINE),
        "rows": [str(row.count("|")) for row in re.findall(r"^\|.*$", prose, re.MULTILINE)],
        "items": re.findall(r"^(?:-|\d+\.) ", prose, re.MULTILINE),
        "pictures": [name.rpartition("/")[2] for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", prose)],
    }


def test_a_translation_has_all_of_its_original() -> None:
    with cases() as case:
        for original, translation in PAIRS.items():
            with case(translation):
                assert shape(translation) == shape(original)


def test_names_are_those_of_the_original() -> None:
    """What stands in backticks is code: a translation drops none."""

    def code(page: str) -> set[str]:
        prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        return set(re.findall(r"`([^`\n]+)`", prose))

    with cases() as case:
        for original, translation in PAIRS.items():
            with case(translation):
                assert code(original) == code(translation)


def test_every_page_of_the_chinese_folder_has_an_original() -> None:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "zh").rglob("*.md")}
    assert found == {page for page in PAIRS.values() if page.startswith("docs/")}
