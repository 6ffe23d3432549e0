"""The file that ``xamp policy show --json`` writes: its format, and how it is read back. Needs no torch.

The file is one JSON object. While its ``schema`` stays the same, keys may be added and are never removed:

* ``what``, ``schema``: ``"xamp policy show"`` and 1.
* ``torch``, ``xamp``: their versions where the file was written.
* ``device``, ``present``: the device type, and whether such a device was present.
* ``op_policy``: ``"portable"`` or ``"native"``; ``dtype``: the lower dtype, ``"float16"`` or ``"bfloat16"``.
* ``rows``: one object for each overload of the table that this torch has, in alphabetical order.
* ``device_only``: the overloads in the device's own list that are not in the table, in alphabetical order.

A row has the fields of :class:`xamp.op_dtypes.survey.Row`, which says what they mean: ``overload``, ``rule``,
``reason``, ``registered``, ``native``, ``added``, ``results`` (an object of ``fp32``, ``lower``, ``mixed``, ``named``),
``source``, ``agrees``, ``cannot``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xamp.errors import PolicyError

__all__ = ["SCHEMA", "WHAT", "Saved", "read"]

WHAT = "xamp policy show"
SCHEMA = 1

Saved = dict[str, Any]

_TOP: dict[str, type] = {
    **dict.fromkeys(("torch", "xamp", "device", "op_policy", "dtype"), str),
    "present": bool,
    "rows": list,
    "device_only": list,
}
_ROW: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("overload", "rule", "reason", "native", "source", "cannot"), str),
    "registered": bool,
    "added": (str, type(None)),
    "results": dict,
    "agrees": (bool, type(None)),
}


def read(path: str) -> Saved:
    """Read the file at ``path`` and check it.

    Raises:
        PolicyError: the file cannot be read, is no JSON, is JSON of something else, is damaged, or has another schema.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # a wrong encoding and wrong JSON both raise a ValueError
        raise PolicyError(f"{path}: no JSON ({error}); {_HOW}") from error
    if not isinstance(found, dict) or found.get("what") != WHAT:
        raise PolicyError(f"{path}: JSON, but of something else; {_HOW}")
    if found.get("schema") != SCHEMA:
        raise PolicyError(
            f"{path}: of schema {found.get('schema')!r}, and this xamp reads {SCHEMA}. Write it with this version of "
            "xamp, or compare with the version that wrote it."
        )
    defect = _defect(found)
    if defect:
        raise PolicyError(f"{path}: damaged: {defect}; {_HOW}")
    return found


_HOW = "a file is written by `xamp policy show DEV --json > FILE`"


def _defect(found: Saved) -> str:
    """What is wrong with the object in the file; empty where nothing is."""
    for key, kind in _TOP.items():
        if not isinstance(found.get(key), kind):
            return f"{key!r} is missing, or no {kind.__name__}"
    names = set()
    for number, row in enumerate(found["rows"]):
        wrong = _wrong_field(row)
        if wrong:
            return f"row {number} lacks {wrong!r}, or has something else there"
        if row["overload"] in names:
            return f"two rows for {row['overload']!r}"
        names.add(row["overload"])
    return "" if all(isinstance(name, str) for name in found["device_only"]) else "'device_only' has more than names"


def _wrong_field(row: object) -> str:
    """The first field of a row that is missing or of the wrong type; empty where all are right."""
    fields = row if isinstance(row, dict) else {}
    for key, kind in _ROW.items():
        if key not in fields or not isinstance(fields[key], kind):
            return key
    results = fields["results"].values()
    return "" if all(result is None or isinstance(result, str) for result in results) else "results"
