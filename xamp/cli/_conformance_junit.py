"""The results of the conformance suite as JUnit XML, which CI services show.

The form is that of pytest: a test suite for each lane, a test case for each clause, with its tier as the class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from xamp.testing.lane import Lane
    from xamp.testing.run import Result

__all__ = ["write"]


def write(file: Path, lanes: Sequence[Lane], results: Sequence[Result]) -> None:
    """Write ``results`` to ``file``. A failed clause is a failure; a known gap, not declared, skipped: all skipped."""
    root = ElementTree.Element("testsuites", name="xamp conformance")
    for lane in lanes:
        found = [result for result in results if result.lane == lane.title]
        suite = ElementTree.SubElement(root, "testsuite", _counts(found), name=lane.title)
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in {"device": lane.device_name, **lane.backend.versions()}.items():
            ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
        for result in found:
            _add_case(suite, result)
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree)
    tree.write(file, encoding="utf-8", xml_declaration=True)


def _counts(results: Sequence[Result]) -> dict[str, str]:
    failed = sum(result.outcome == "failed" for result in results)
    skipped = sum(result.outcome not in ("failed", "passed") for result in results)
    seconds = sum(result.seconds for result in results)
    return {
        "tests": str(len(results)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(skipped),
        "time": f"{seconds:.3f}",
    }


def _add_case(suite: ElementTree.Element, result: Result) -> None:
    name = _clean(result.clause.partition(".")[2])
    case = ElementTree.SubElement(suite, "testcase", classname=result.tier, name=name, time=f"{result.seconds:.3f}")
    if result.outcome == "failed":
        ElementTree.SubElement(case, "failure", message=_clean(result.reason)).text = _clean(result.text)
    elif result.outcome != "passed":
        ElementTree.SubElement(case, "skipped", message=_clean(f"{result.outcome}: {result.reason}"))


def _clean(text: str) -> str:
    """Return ``text`` without the characters that XML cannot hold: controls, surrogates, two that are none."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
