"""Writes the section on rules of docs/porting.md: each rule of ``xamp port`` with its text and an example.

The text above it is written by hand. With ``--check`` nothing is written: it fails where the section is not what the
rules say.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence

from xamp.port.explain import about, change, in_order
from xamp.port.rule import Example, Rule
from xamp.port.rules import built_in

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "porting.md"
COMMAND = ".venv/bin/python ci/porting_page.py"
FIRST = "examples of a rule, and what it leaves alone.\n"
"""The last line by hand."""


def page() -> str:
    """The whole page."""
    by_hand, line, _ = PAGE.read_text(encoding="utf-8").partition(FIRST)
    return "".join((by_hand, line, *rules(in_order(built_in()))))


def rules(found: Sequence[Rule]) -> Iterator[str]:
    """A section for each rule, with the first example that changes code; ``--explain`` has all of them."""
    for rule in found:
        yield f"\n### {rule.name}\n\n{rule.grade.value.capitalize()}. {about(rule)}\n"
        for example in [example for example in rule.examples if changes_code(example)][:1]:
            yield f"\n```diff\n{change(*example).rstrip()}\n```\n"


def changes_code(example: Example) -> bool:
    """Whether a line that is no note is another one after porting."""
    after = (example.after or example.before).splitlines()
    return [line for line in after if "# TODO(xamp): " not in line] != example.before.splitlines()


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    made = page()
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != made:
        print(f"docs/porting.md is not what the rules say. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
