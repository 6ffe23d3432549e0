"""Writes the figures of docs/performance.md from docs/performance/*.json, which ``ci/bench.sh`` writes for a machine.

So are the benchmarks of results of ``ci/gpu.sh``, which are in docs/gpu. With ``--check`` nothing is written: it fails
where the page is not what the files say.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.marked import placed, table

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
FOLDER, CARDS, PAGE = DOCS / "performance", DOCS / "gpu", DOCS / "performance.md"
COMMAND = ".venv-bench/bin/python ci/performance_page.py"
MAIN = (
    ("a step around the numbers: scale, unscale, check, step", "the `torch.amp` loop by hand", "step", ""),
    ("`xamp.GradScaler` in the same loop", "`torch.amp.GradScaler`", "scaler", ", "),
    ("a managed forward, what it adds", "`with torch.autocast(...)` by hand", "forward", ""),
    *(("whole steps of models", by, "models", f"over {by}") for by in ("torch.amp", "accelerate", "Fabric", "Apex")),
    ("whole steps, portable op policy", "the native op policy", "portable", "16$"),
    ("peak memory a parameter, Adam at O2 and O5", "18 bytes that are needed", "memory", "O[25] auto$"),
    ("waits for the device in a step, fused optimizer", "none", "syncs", " fused"),
)
"""Rows of the first table: what, against what, and which figures: of a benchmark, those in which a pattern is found."""
SMALL = ("ratio", "x", "us", "ms", "a step", "bytes")
"""Units of which less is better."""
BUSY = 0.5
"""A machine is called busy where its load, less the benchmark's own 1, is more than this."""

Row = Mapping[str, Any]


def figures(machines: Sequence[Row]) -> Iterator[str]:
    """The figures that matter, with a column for each machine; then all of each machine."""
    heads = ["what", "against", *(f"{each['machine']['device']}, {each['machine']['date']}" for each in machines)]
    rows = []
    for what, against, name, pattern in MAIN:
        found = [[f for f in m["found"].get(name, ()) if f["unit"] and re.search(pattern, f["case"])] for m in machines]
        rows.append([what, against, *(shown(each) or "not measured" for each in found)])
    yield table(heads, rows)
    for machine in machines:
        yield from section(machine)


def section(machine: Row) -> Iterator[str]:
    """What was measured on one machine."""
    about = machine["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    others = max(about["load"], about["load at the end"] - 1)
    told = f"**Other work ran meanwhile: {others:.1f} processes, by the load.**"
    busy = told if others > BUSY else "Nothing else ran."
    quick = " Few rounds and no large models (`--quick`)." if about["quick"] else ""
    cores = f"{about['cores']} cores of which {about['threads']} used"
    yield f"\n### {about['device']}\n\n{about['date']}; {about['type']}, {cores}, {about['system']}; "
    yield f"{versions}. {busy}{quick}\n\n"
    if about.get("picture"):
        yield f"![Ratios of times, with quartiles](performance/{about['picture']})\n\n"
    rows = []
    for name, cases in machine["found"].items():
        for unit in (each for each in SMALL if any(case["unit"] == each for case in cases)):
            chosen = [case for case in cases if case["unit"] == unit and "left out" not in case["case"]]
            rows.append([f"`{name}`", str(len(chosen)), shown(chosen)])
    yield table(("benchmark", "cases", "median; worst"), rows)


def shown(cases: Sequence[Row]) -> str:
    """A figure, or the median and the worst of several; and how many bounds were missed."""
    if not cases:
        return ""
    worst = max(cases, key=lambda case: (case["missed"], case["value"]))
    missed = sum(case["missed"] for case in cases)
    unit = "" if worst["unit"] == "ratio" else f" {worst['unit']}"
    text = number(statistics.median(case["value"] for case in cases)) + unit
    if number(worst["value"]) + unit != text:
        text += f"; worst {number(worst['value'])} ({worst['case'].partition(': over')[0]})"
    if len({case["bound"] for case in cases}) == 1 and worst["bound"] is not None:
        text += f", bound {worst['bound']:g}"
    return text + (f", **missed** by {missed} of {len(cases)}" if missed else "")


def number(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 or not value else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


def read() -> list[Row]:
    """What is in the files, devices first, CPUs last."""
    found = []
    for path in (*sorted(FOLDER.glob("*.json")), *sorted(CARDS.glob("*.json"))):
        result = json.loads(path.read_text(encoding="utf-8"))
        if machine := result if path.parent == FOLDER else result.get("benchmarks"):
            picture = FOLDER / f"{path.stem}.png"
            machine["machine"]["picture"] = picture.name if picture.exists() else None
            found.append(machine)
    return sorted(found, key=lambda machine: machine["machine"]["type"] == "cpu")


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    made = placed(old, "figures", "".join(figures(read())), "ci/performance_page.py")
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif made != old:
        print(f"docs/performance.md is not what docs/performance/ says. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
