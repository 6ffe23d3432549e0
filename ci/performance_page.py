"""Writes docs/performance.md from docs/performance/*.json, which ``ci/bench.sh`` writes: one file for each machine.

The benchmarks of results of ``ci/gpu.sh``, which are in docs/gpu, are on the page too, and the counts of
ci/kernels/table.tsv.

With ``--check`` nothing is written: it fails where the page is not what the files say.
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
from ci.marked import table

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "performance"
CARDS = ROOT / "docs" / "gpu"
PAGE = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "ci" / "kernels" / "table.tsv"
COMMAND = ".venv-bench/bin/python ci/performance_page.py"

HEAD = """# Performance

What xamp costs, against the loop written by hand and against other libraries. A ratio below 1 means that xamp takes
less time.

"""

NO_DEVICE = """**There are no figures of a GPU or an NPU on this page: `ci/gpu.sh` was not run on one.** Those of a CPU
are of small batches and say little about a GPU.

"""

HOW = f"""
`ci/bench.sh` measures, on a card `ci/gpu.sh`; `{COMMAND}` makes this page.
Both sides take turns in one process, and a figure is the median over the rounds of the ratio (or difference) within a
round. So a busy machine moves the microseconds more than the ratios. On a CPU the clock is the time that the process
computes, on one thread. Where a cell stands for several cases, it has their median and the worst, and in brackets
which that is: for steps of optimizers the number of parameters. A bound is the most that a figure may be. Bounds in
microseconds were set where `torch.mm` of small matrices takes 1.2 us. Quartiles and times of each case are in
`docs/performance/`; `benchmarks/README.md` says what each benchmark does.

"""

MAIN = (
    ("a step around the numbers: scale, unscale, check, step", "the `torch.amp` loop by hand", "step", ""),
    ("`xamp.GradScaler` in the same loop", "`torch.amp.GradScaler`", "scaler", ", "),
    ("a managed forward, what it adds", "`with torch.autocast(...)` by hand", "forward", ""),
    *(
        ("whole steps of models", name, "models", f"over {name}")
        for name in ("torch.amp", "accelerate", "Fabric", "Apex")
    ),
    ("whole steps, portable op policy", "the native op policy", "portable", "16$"),
    ("peak memory a parameter, Adam at O2 and O5", "18 bytes that are needed", "memory", "O[25] auto$"),
    ("waits for the device in a step, fused optimizer", "none", "syncs", " fused"),
)
"""Rows of the first table: what, against what, and which figures: of a benchmark, those in which a pattern is found."""

TITLES = {
    "step": "A training step around the numbers, over the `torch.amp` loop by hand",
    "scaler": "`xamp.GradScaler` over `torch.amp.GradScaler`, the same loop",
    "forward": "A managed forward, less `with torch.autocast(...)` by hand",
    "models": "Whole steps of models",
    "portable": "Whole steps under the portable op policy, over the native one",
    "bandwidth": "Unscale and step of large parameters: share of the copy bandwidth",
    "kernels": "The kernels of a step in one pass, one by one",
    "one-pass-host": "The host's part of a check and a step in one pass, over torch's fused AdamW, without kernels",
    "ops": "Operators under the portable op policy, on a CPU",
    "apex": "Functions under the casts of `xamp.apex`, on a CPU",
    "apex-optimizers": "Steps of the optimizers of `xamp.apex`",
    "syncs": "Waits for the device in one step",
    "memory": "Peak bytes for each parameter, Adam",
    "trace": "A step under `xamp.trace`, over one without",
    "import": "Import, beyond torch",
    "instructions": "Instructions of one step, on a CPU",
    "phases": "Where the time of a step goes",
}
NOTES = {
    "portable": "Each operator that the policy adds runs a few microseconds of Python: 10 for a `layer_norm` on an\n"
    "idle AMD EPYC. And it casts where the device's list computes in 16 bits. So tensors of 16 x 64 have no bound.\n\n",
}
COUNTED = r"(?P<row>[^,]+), (?P<at>\d+)(?:, (?P<column>.+))?$"
NAMED = r"(?P<row>[^:]+): (?P<at>.+)"
SHAPES = {
    "step": COUNTED,
    "scaler": COUNTED,
    "forward": r"(?P<row>O\d) (?P<at>.+)",
    "models": r"(?P<row>[^:]+): (?:\w+ )?(?P<column>over .+|a second|model FLOP utilisation|peak memory|waits, .+)",
    "portable": r"(?P<row>.+), (?P<column>\w+16)$",
    "bandwidth": r"(?P<row>[^,]+), (?P<column>O\d|torch\.amp)$",
    "ops": NAMED,
    "apex": NAMED,
    "memory": r"(?P<row>.+?) (?P<column>(?:auto|for-loop|foreach).*)",
    "instructions": r"(?P<row>[^,]+), (?P<at>\d+): (?P<column>\w+)",
}
"""How a case names its row, its column and its place among the cases of both. A case of another form is told below."""

CODE = """## Machine code of the step in one pass

Counts, not times: no card has run it. `ci/kernels.sh` compiles the kernels for cards that are not there, reads the
machine code, and fails where one takes more than `ci/kernels/table.tsv` says. Instructions are those of a thread on the
path of a full aligned block, for each element; slow paths of roots and quotients are not taken. At a time run blocks of
256 threads on a multiprocessor of an H100, waves on a SIMD of an MI300. All loads of elements have 16 bytes, or 8 of a
16-bit tensor in a step; all are on their way before the first is used.

"""
RULES = {"adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "lamb": "LAMB", "novograd": "NovoGrad"}
SUMS = {"2": "L2 norm", "inf": "largest", "p": "other norm"}
BUSY = 0.5
"""A machine is called busy where its load, less the benchmark's own 1, is more than this."""

Row = Mapping[str, Any]


def page(machines: Sequence[Row]) -> str:
    """The whole page."""
    of_a_card = any(machine["machine"]["type"] != "cpu" for machine in machines)
    parts = [HEAD, "" if of_a_card else NO_DEVICE, table(*main_figures(machines)), HOW]
    for machine in machines:
        parts += section(machine)
    return "".join((*parts, *machine_code(KERNELS.read_text(encoding="utf-8").splitlines()[1:])))


def main_figures(machines: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The figures that matter: heads of a table with a column for each machine, and its rows."""
    heads = ["what", "against", *(f"{m['machine']['device']}, {m['machine']['date']}" for m in machines)]
    rows = []
    for what, against, name, pattern in MAIN:
        found = [[f for f in m["found"].get(name, ()) if re.search(pattern, f["case"]) and f["unit"]] for m in machines]
        rows.append([what, against, *(shown(figures) or "not measured" for figures in found)])
    return heads, rows


def machine_code(lines: Sequence[str]) -> Iterator[str]:
    """What the kernels that go over elements take, by the lines of ci/kernels/table.tsv: from the least to the most."""
    yield CODE
    found: dict[str, list[list[str]]] = {}
    for kernel, constants, *counts in (text.split("\t") for text in lines):
        c = dict(pair.split("=") for pair in constants.split())
        if kernel in ("step", "sums"):
            name = RULES[c["RULE"]] if kernel == "step" else "check" if c["CHECKS"] == "1" else SUMS[c["KIND"]]
            found.setdefault(name, []).append(counts)
    rows = [[name, str(len(of)), *(between(counts) for counts in zip(*of, strict=True))] for name, of in found.items()]
    heads = ("instructions an element", "registers", "blocks at a time", "MI300: instructions", "registers", "waves")
    yield table(("kernel", "kinds", *heads), rows)


def between(counts: Sequence[str]) -> str:
    """The least and the most of ``counts``."""
    low, high = min(counts, key=float), max(counts, key=float)
    return low if low == high else f"{low} to {high}"


def section(machine: Row) -> Iterator[str]:
    """What was measured on one machine."""
    about = machine["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    yield f"## {about['device']}\n\n"
    cores = f"{about['cores']} cores of which {about['threads']} used"
    yield f"{about['date']}; {about['type']}, {cores}, {about['system']}; {versions}. {busy(about)}\n\n"
    if about["quick"]:
        yield "Few rounds and no large models (`--quick`).\n\n"
    if about.get("picture"):
        yield f"![Ratios of times, with quartiles](performance/{about['picture']})\n\n"
    for name, figures in machine["found"].items():
        yield f"### {TITLES[name]}\n\n{NOTES.get(name, '')}"
        yield from tables(figures, SHAPES.get(name, r"(?P<row>.+)"))


def tables(figures: Sequence[Row], shape: str) -> Iterator[str]:
    """The figures of a benchmark as a table, and below it those that have no place in it."""
    places: dict[str, dict[str, list[Row]]] = {}
    columns: dict[str, set[str]] = {}
    others = []
    for figure in figures:
        match = re.match(shape, figure["case"])
        if not figure["unit"] or "left out" in figure["case"] or not match:
            others.append(figure["case"] + (f": {shown([figure])}" if figure["value"] else ""))
            continue
        parts = match.groupdict()
        column = parts.get("column") or figure["unit"]
        columns.setdefault(column, set()).add(figure["unit"])
        places.setdefault(parts["row"], {}).setdefault(column, []).append({**figure, **parts})
    if places:
        units = set.union(*columns.values())
        told = units.pop() if len(units) == 1 else None  # by the title
        rows = [[row, *(shown(cells.get(c, ()), told or c) for c in columns)] for row, cells in places.items()]
        yield table(("case", *columns), rows) + "\n"
    if others:
        yield "; ".join(others) + ".\n\n"


def busy(about: Row) -> str:
    """Whether other work ran, by the load of the machine before and after."""
    before, after = about["load"], max(0.0, about["load at the end"] - 1)
    others = max(before, after)
    if others > BUSY:
        return f"**Other work ran on the machine meanwhile: {others:.1f} processes, by its load.**"
    return "Nothing else ran on the machine."


def shown(figures: Sequence[Row], told: str = "ratio") -> str:
    """A figure, or the median and the worst of several; ``told`` is the unit that the table tells."""
    if not figures:
        return ""
    worst = max(figures, key=lambda figure: (figure["missed"], figure["value"]))
    missed = sum(figure["missed"] for figure in figures)
    text = middle = amount({**worst, "value": statistics.median(figure["value"] for figure in figures)}, told)
    if amount(worst, told) != middle:
        text = f"{middle}; worst {amount(worst, told)} ({worst.get('at') or worst['case'].partition(': over')[0]})"
    if len({figure["bound"] for figure in figures}) == 1 and worst["bound"] is not None:
        text += f", bound {worst['bound']:g}"
    return text + (f", **missed** by {missed} of {len(figures)}" if missed else "")


def amount(figure: Row, told: str = "ratio") -> str:
    """The value of a figure, with its unit where nothing tells it."""
    return number(figure["value"]) + ("" if figure["unit"] in (told, "ratio") else f" {figure['unit']}")


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
    made = page(read())
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        print(f"docs/performance.md is not what docs/performance/ says. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
