"""Compares two surveys of ``xamp policy show``. Needs no torch.

``xamp policy diff --json`` writes one JSON object. While its ``schema`` stays the same, keys may be added and are never
removed:

* ``what``, ``schema``: ``"xamp policy diff"`` and 1.
* ``equal``: true where nothing differs, or only what is expected to differ.
* ``a``, ``b``: the two surveys without their rows and lists.
* ``same``: how many overloads are alike.
* ``differences``: overloads whose results have different dtypes, or whose call only one side refuses. Each is an object
  of ``overload``, ``a`` and ``b``; the last two are the rows.
* ``expected``: the same for overloads that one of two types of devices cannot equalise; each also has ``why``.
* ``unknown``: overloads for which one of the two surveys does not show enough to compare.
* ``rows``, with ``a`` and ``b``: overloads that have a row on this side only: the other side's torch lacks them, or its
  table is of another version.
* ``device_only``, with ``a`` and ``b``: overloads in the device's list of this side only, which the table does not
  govern. Between two types of devices they are expected; between two devices of one type they are differences.
"""

from __future__ import annotations

from typing import Any

from xamp.casting.ops import UNKNOWN
from xamp.cli._policy_file import Saved

__all__ = ["Diff", "compare"]

Diff = dict[str, Any]

_SCHEMA = 1


def compare(a: Saved, b: Saved) -> Diff:
    """Compare ``a`` and ``b``, which were made under the same op policy with the same lower dtype."""
    rows_a, rows_b = ({row["overload"]: row for row in side["rows"]} for side in (a, b))
    one_type = a["device"] == b["device"]
    found: dict[str, list[Diff]] = {"same": [], "differences": [], "expected": [], "unknown": []}
    for overload in sorted(rows_a.keys() & rows_b.keys()):
        row = _pair(rows_a[overload], rows_b[overload], a["device"], b["device"])
        found[_verdict(row["a"], row["b"], one_type)].append(row)
    rows = {"a": sorted(rows_a.keys() - rows_b.keys()), "b": sorted(rows_b.keys() - rows_a.keys())}
    only_a, only_b = set(a["device_only"]), set(b["device_only"])
    device_only = {"a": sorted(only_a - only_b), "b": sorted(only_b - only_a)}
    return {
        "what": "xamp policy diff",
        "schema": _SCHEMA,
        "equal": not (found["differences"] or any(rows.values()) or (one_type and any(device_only.values()))),
        "a": {key: value for key, value in a.items() if key not in ("rows", "device_only")},
        "b": {key: value for key, value in b.items() if key not in ("rows", "device_only")},
        "same": len(found["same"]),
        "differences": [{key: value for key, value in row.items() if key != "why"} for row in found["differences"]],
        "expected": found["expected"],
        "unknown": [row["overload"] for row in found["unknown"]],
        "rows": rows,
        "device_only": device_only,
    }


def _pair(a: Saved, b: Saved, *devices: str) -> Diff:
    """The two rows of one overload, and why a device cannot follow the table there."""
    why = [f"{device}: {row['cannot']}" for device, row in zip(devices, (a, b), strict=True) if row["cannot"]]
    return {"overload": a["overload"], "a": a, "b": b, "why": "; ".join(why)}


def _verdict(a: Saved, b: Saved, one_type: bool) -> str:
    """The list of the answer that a pair of rows belongs to."""
    if a["cannot"] or b["cannot"]:
        alike = (a["cannot"], a["results"]) == (b["cannot"], b["results"])
        return "same" if alike else "differences" if one_type else "expected"
    cells = [(a["results"].get(name), b["results"].get(name)) for name in a["results"].keys() | b["results"].keys()]
    known = [(one, other) for one, other in cells if UNKNOWN not in (one, other)]
    if any(one != other for one, other in known):
        return "differences"
    return "same" if len(known) == len(cells) else "unknown"
