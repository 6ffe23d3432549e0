"""What is published of a result: no path and no host, and of clauses that passed their number only.

python ci/results.py results/DEVICE-....json ...    writes that of results of ``ci/device.sh`` into docs/results
"""

from __future__ import annotations

import collections
import json
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "ResultError", "clean", "cleaned", "kept", "refuse_private"]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
SCHEMA = 1
_NOTED = ("failed", "known gap", "skipped")
_PATH = re.compile(r"file://\S+|(?<![\w./])(?:/(?:[\w.+@-]+/)+[\w.+@-]*|~/\S+|[A-Za-z]:\\\S+)")
_HOST = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|corp|home|intra)\b", re.I)


class ResultError(ValueError):
    """A file cannot be shown. The message says which, and why."""


def clean(text: str) -> str:
    """``text`` with the last part of each path only, and without hosts."""
    text = _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], text)
    host = socket.gethostname()
    text = _HOST.sub("a host", text)
    return text.replace(host, "a host") if len(host) > 3 else text


def cleaned(value: Any) -> Any:
    """A value of JSON with all its texts cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {key: cleaned(each) for key, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list) else value


def refuse_private(name: str, value: Any) -> None:
    """Raise ResultError where a text of a value names a path or a host."""
    if isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            refuse_private(name, each)
    elif isinstance(value, str) and clean(value) != value:
        raise ResultError(f"{name} names a path or a host in {value!r}, which a published result must not")


def kept(path: Path) -> dict[str, Any]:
    """What is published of a file: counts by tier and outcome, and the clauses that did not simply pass."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ResultError(f"{path.name}: schema {found['schema']!r}; this reads {SCHEMA}")
        tiers: dict[str, Any] = found.get("tiers", {})
        for each in found["results"] if "tiers" not in found else ():
            tiers.setdefault(each["tier"], collections.Counter())[each["outcome"]] += 1
        lane = found["lanes"][0]
        notes = [each for each in found["results"] if each["outcome"] in _NOTED]
        return {
            **{key: found[key] for key in ("schema", "xamp", "python")},
            "run": {key: found["run"][key] for key in ("device", "how", "when", "by")},
            "lanes": [{"name": lane["name"], "versions": lane["versions"]}],
            "clauses": found["clauses"],
            "tiers": tiers,
            "results": [{key: each[key] for key in ("clause", "outcome", "reason")} for each in notes],
        }
    except (OSError, KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ResultError(f"{path.name} is no result of `ci/device.sh`: {error!r}") from error


def main(words: Sequence[str]) -> int:
    """Write what is published of files; return the exit status."""
    try:
        for path in map(Path, words):
            text = json.dumps(cleaned(kept(path)), indent=1) + "\n"
            (FOLDER / path.name).write_text(text, encoding="utf-8")
    except ResultError as error:
        print(f"ci/results.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
