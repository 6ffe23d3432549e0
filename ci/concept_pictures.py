"""Draws the pictures of docs/concepts.md: the ranges of fp16 and bf16, and where the gradients of a training fall.

The second picture is of a real training: a small network in fp32 that learns to draw rings. ``--check`` trains again
and compares the figures with docs/pictures/gradients.json. It needs matplotlib for drawing only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COMMAND = "python ci/concept_pictures.py"
SCALE = 16  # the exponent of the loss scale at the start: 2**16
TINY, NORMAL, LARGEST = -24, -14, 16  # exponents of fp16: smallest number, smallest with all digits, overflow


def gradients() -> torch.Tensor:
    """Train 120 steps in fp32; return the exponents of all gradients of the last 20 that are not zero."""
    torch.manual_seed(0)
    line = torch.linspace(-1, 1, 32)
    points = torch.cartesian_prod(line, line)
    rings = (torch.sin(12 * points.norm(dim=1, keepdim=True)) > 0).float()
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for step in range(120):
        optimizer.zero_grad()
        loss = 0.01 * nn.functional.binary_cross_entropy_with_logits(model(points), rings)
        loss.backward()
        optimizer.step()
        if step >= 100:
            seen += [param.grad.flatten().double() for param in model.parameters() if param.grad is not None]
    values = torch.cat(seen).abs()
    return values[values > 0].log2()


def shares(exponents: torch.Tensor) -> dict[str, float]:
    """What part of the gradients fp16 loses or blurs, without the scale and with it."""
    found = {}
    for name, shift in (("unscaled", 0), ("scaled", SCALE)):
        moved = exponents + shift
        found[f"{name}_lost"] = float((moved < TINY - 1).double().mean())
        found[f"{name}_blurred"] = float(((moved >= TINY - 1) & (moved < NORMAL)).double().mean())
        found[f"{name}_overflow"] = float((moved >= LARGEST).double().mean())
    return {name: round(value, 4) for name, value in found.items()}


def ranges(pyplot: Any) -> Any:
    """Bars on an axis of powers of two: what each dtype can hold."""
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    rows = (
        ("fp32", -149, -126, 128, "24 bits"),
        ("bf16", -133, -126, 128, "8 bits"),
        ("fp16", -24, -14, 16, "11 bits"),
    )
    for y, (name, tiny, normal, largest, digits) in enumerate(reversed(rows)):
        axes.barh(y, normal - tiny, left=tiny, height=0.55, color="#c5cae9")
        axes.barh(y, largest - normal, left=normal, height=0.55, color="#3f51b5")
        place = (largest + 3, "left", "black") if largest < 100 else ((largest + normal) / 2, "center", "white")
        axes.text(place[0], y, f"{name}: {digits}", ha=place[1], va="center", color=place[2])
    axes.set_yticks([])
    axes.set_xlim(-155, 135)
    ticks = (-149, -126, -24, 0, 16, 128)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_title("What each dtype can hold. Light: with fewer digits. Outside: 0 or inf.", fontsize=10)
    return figure


def fall(pyplot: Any, exponents: torch.Tensor) -> Any:
    """Two histograms over fp16's range: gradients as they are, and times the loss scale."""
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    bins = list(range(-46, 22))
    axes.axvspan(-46, TINY - 1, color="#ffcdd2")
    axes.axvspan(TINY - 1, NORMAL, color="#fff3cd")
    axes.axvspan(LARGEST, 22, color="#ffcdd2")
    axes.hist(exponents.tolist(), bins, color="#757575", alpha=0.75, label="gradients")
    axes.hist((exponents + SCALE).tolist(), bins, color="#3f51b5", alpha=0.75, label=f"times $2^{{{SCALE}}}$")
    top = axes.get_ylim()[1]
    places = ((-36, "lost: 0"), (-19.5, "few digits"), (1, "fp16 has all its digits"), (19, "inf"))
    for x, text in places:
        axes.text(x, top * 1.1, text, ha="center", va="top", fontsize=9)
    axes.set_ylim(0, top * 1.12)
    axes.set_xlim(-46, 22)
    axes.set_yticks([])
    ticks = (-40, TINY, NORMAL, 0, LARGEST)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.legend(loc="center right", fontsize=9)
    return figure


def draw(exponents: torch.Tensor) -> None:
    """Write both pictures; the same figures give the same files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "xamp", "svg.fonttype": "path"})
    from matplotlib import pyplot

    for name, figure in (("ranges", ranges(pyplot)), ("gradients", fall(pyplot, exponents))):
        path = FOLDER / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main(words: list[str]) -> int:
    """Draw, or with ``--check`` compare; return the exit code."""
    torch.set_num_threads(1)
    exponents = gradients()
    found = shares(exponents)
    path = FOLDER / "gradients.json"
    if words == ["--check"]:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.keys() == found.keys() and all(math.isclose(kept[key], found[key], abs_tol=0.02) for key in kept):
            return 0
        print(f"docs/pictures/gradients.json is not what the training gives: {found}. Run: {COMMAND}")
        return 1
    FOLDER.mkdir(exist_ok=True)
    draw(exponents)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
