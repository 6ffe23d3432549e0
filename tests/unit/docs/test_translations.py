"""The pages in Chinese follow the English ones: the same headings, tables, lists, blocks and pictures."""

from __future__ import annotations

import re

import pytest
from docs_pages import ROOT

PAIRS = {
    "README.md": "README.zh-CN.md",
    "docs/start.md": "docs/zh/start.md",
    "docs/concepts.md": "docs/zh/concepts.md",
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


@pytest.mark.parametrize(("original", "translation"), PAIRS.items())
def test_a_translation_has_all_of_its_original(original: str, translation: str) -> None:
    assert shape(translation) == shape(original)


@pytest.mark.parametrize(("original", "translation"), PAIRS.items())
def test_names_are_those_of_the_original(original: str, translation: str) -> None:
    """What stands in backticks is code: a translation drops none."""

    def code(page: str) -> set[str]:
        prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        return set(re.findall(r"`([^`\n]+)`", prose))

    assert code(original) == code(translation)


def test_every_page_of_the_chinese_folder_has_an_original() -> None:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "zh").rglob("*.md")}
    assert found == {page for page in PAIRS.values() if page.startswith("docs/")}
