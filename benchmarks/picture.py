"""Figures of ratios as a picture: a bar for each, its spread as a line, and a mark at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Figure

PANELS = ("step", "models", "portable")
"""The benchmarks whose figures are ratios of times."""


def draw(found: Mapping[str, Sequence[Figure]], title: str, path: Path) -> bool:
    """Write ``path`` as PNG, a panel for each benchmark of :data:`PANELS`; False if there is nothing to draw."""
    panels = {name: [f for f in found.get(name, ()) if f.unit == "ratio" and f.spread] for name in PANELS}
    panels = {name: figures for name, figures in panels.items() if figures}
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    counts = [len(figures) for figures in panels.values()]
    canvas = Canvas(figsize=(8, 1.5 + 0.24 * sum(counts)), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(title, fontsize=9)
    axes = canvas.subplots(len(panels), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axis, (name, figures) in zip(axes, panels.items(), strict=True):
        _panel(axis, name, figures)
    canvas.savefig(path, dpi=100, metadata={"Software": None})
    return True


def _panel(axis: Any, name: str, figures: Sequence[Figure]) -> None:
    places = range(len(figures))
    values = [figure.value for figure in figures]
    spreads = [figure.spread or (figure.value, figure.value) for figure in figures]
    error = [[v - low for v, (low, _) in zip(values, spreads, strict=True)]]
    error.append([high - v for v, (_, high) in zip(values, spreads, strict=True)])
    colours = ["#c44e52" if figure.missed else "#4c72b0" for figure in figures]
    axis.barh(places, values, xerr=[[max(0.0, e) for e in side] for side in error], color=colours, height=0.7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(list(places), [figure.case for figure in figures], fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.invert_yaxis()
    over = "portable over native" if name == "portable" else "xamp over the other way"
    axis.set_title(f"{name}: time of {over}; less is better", fontsize=8)
