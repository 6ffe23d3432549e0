"""Writes docs/performance.md from docs/performance/*.json, which ``ci/bench.sh`` writes: one file for each machine.

The benchmarks of results of ``ci/gpu.sh``, which are in docs/gpu, are on the page too, and the counts of
ci/kernels/table.tsv.

With ``--check`` nothing is written: it fails where the page is not what the files say.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "performance"
CARDS = ROOT / "docs" / "gpu"
PAGE = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "ci" / "kernels" / "table.tsv"
COMMAND = ".venv-bench/bin/python ci/performance_page.py"

HEAD = f"""# Performance

What xamp costs, against the loop written by hand and against other libraries. `ci/bench.sh` measures it, on a card
`ci/gpu.sh`, and `{COMMAND}` makes this page from what they wrote. All comparisons are pairs: both sides
take turns in one process, and a figure is the median of the ratios (or differences) within a round, with the quartiles
in brackets. So a busy machine moves the microseconds more than the ratios. On a CPU the clock is the time that the
process computes, on one thread. A ratio below 1 means that xamp takes less time. A bound is the most that a figure may
be. Bounds in microseconds were set on a machine on which `torch.mm` of small matrices takes 1.2 us; under the casts of
`xamp.apex` below is what it takes here.

"""

NO_DEVICE = """**There are no figures of a GPU or an NPU on this page: `ci/gpu.sh` was not run on one.** On such a
device it trains the models at their usual sizes, and also looks for waits in the sync debug mode. On a CPU tokens and
images a second, memory and model FLOP utilisation are measured with small batches. They say little about a GPU.

"""

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
    "portable": "Each operator that the policy adds to the device's list runs a few microseconds of Python: for a "
    "`layer_norm`, on an idle AMD EPYC, 10, of which 6 only hand the call to Python and back. And it casts where the "
    "device's list would compute in 16 bits. The bound is for tensors of some 100 x 100 and more. Smaller ones, "
    "16 x 64, where an operator computes for no longer than that, have none. Of what `10 softmax` takes more in bf16, "
    "3 percent are the softmax in fp32 itself, with its casts, forward and backward. They are there too where a "
    "script writes `torch.softmax(x, -1, dtype=torch.float32)` under the native policy.\n\n",
}
CODE = """## Machine code of the step in one pass

Counts, not times: no card has run it. `ci/kernels.sh` compiles the kernels for cards that are not there, reads the
machine code, and fails where one takes more than here. Instructions are those of a thread on the path that a full
aligned block takes, divided by its elements; slow paths of roots and quotients are not taken. What runs at a time are
blocks of 256 threads on a multiprocessor of an H100, and waves on a SIMD of an MI300. All loads of elements have 16
bytes, or 8 of a 16-bit tensor in a step; all are on their way before the first is used.

"""
DTYPES = ("-", "fp32", "fp16", "bf16")
BUSY = 0.5
"""A machine is called busy where its load, less the benchmark's own 1, is more than this."""

Row = Mapping[str, Any]


def page(machines: Sequence[Row]) -> str:
    """The whole page."""
    parts = [HEAD, "".join(missing(machines))]
    for machine in machines:
        parts += section(machine)
    return "".join((*parts, *machine_code(KERNELS.read_text(encoding="utf-8").splitlines()[1:])))


def machine_code(lines: Sequence[str]) -> Iterator[str]:
    """What the kernels that go over elements take, by the lines of ci/kernels/table.tsv."""
    yield CODE
    rows = []
    for kernel, constants, *counts in (text.split("\t") for text in lines):
        if kernel in ("step", "sums"):
            rows.append((*kernel_of(kernel, dict(pair.split("=") for pair in constants.split())), *counts))
    heads = (
        "kernel",
        "parameter, copy, states",
        "gradient",
        "instructions an element",
        "registers",
        "blocks at a time",
    )
    yield table((*heads, "instructions, MI300", "registers, MI300", "waves at a time"), rows)


def kernel_of(kernel: str, c: Mapping[str, str]) -> tuple[str, str, str]:
    """What a kernel with its constants does, and on which dtypes."""
    grad = DTYPES[int(c["GRADS"])]
    if kernel == "sums":
        does = "check" if c["CHECKS"] == "1" else {"2": "L2 norm", "inf": "largest", "p": "other norm"}[c["KIND"]]
        more = [word for name, word in (("IN_PLACE", "in place"), ("SCALED", "scaled")) if c[name] == "1"]
        return ", ".join([does, *more]), "", grad
    rule = {"adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "lamb": "LAMB", "novograd": "NovoGrad"}[c["RULE"]]
    asked = [("DECOUPLED", "decoupled decay"), ("LATE", "late decay"), ("SKIPS", "may be skipped")]
    more = [word for name, word in asked if c[name] == "1"]
    more += [f"pass {c['PHASE']}"] if rule == "LAMB" else []
    held = [DTYPES[int(c["PARAMS"])], DTYPES[int(c["LOWS"])], f"{c['STATES']} x {DTYPES[int(c['STATE_CODE'])]}"]
    return ", ".join([rule, *more]), ", ".join(held), grad


def missing(machines: Sequence[Row]) -> Iterator[str]:
    """What nobody has measured."""
    if not any(machine["machine"]["type"] != "cpu" for machine in machines):
        yield NO_DEVICE


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
        yield table(("case", "value", "bound", "detail"), [line(figure) for figure in figures])
        yield "\n"


def busy(about: Row) -> str:
    """Whether other work ran, by the load of the machine before and after."""
    before, after = about["load"], max(0.0, about["load at the end"] - 1)
    others = max(before, after)
    if others > BUSY:
        return f"**Other work ran on the machine meanwhile: {others:.1f} processes, by its load.**"
    return "Nothing else ran on the machine."


def line(figure: Row) -> list[str]:
    """A figure as a line of a table."""
    bound = "" if figure["bound"] is None else f"{figure['bound']:g}" + (", **missed**" if figure["missed"] else "")
    spread = figure["spread"]
    between = "" if spread is None else f" ({number(spread[0])} to {number(spread[1])})"
    value = f"{number(figure['value'])}{between} {figure['unit']}".strip()
    if not figure["unit"]:  # a line of words
        value = ""
    return [figure["case"], value, bound, " ".join(figure["detail"].split())]


def number(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    body = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    return "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n" + body


def read() -> list[Row]:
    """What is in the files, devices first, CPUs last."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        machine = json.loads(path.read_text(encoding="utf-8"))
        picture = path.with_suffix(".png")
        machine["machine"]["picture"] = picture.name if picture.exists() else None
        found.append(machine)
    for path in sorted(CARDS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if machine := result.get("benchmarks"):
            picture = (FOLDER / path.name).with_suffix(".png")
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
