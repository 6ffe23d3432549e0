"""Pictures by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xamp.debug.alignment import Comparison
from xamp.debug.page import differences
from xamp.debug.series import Key
from xamp.errors import PolicyError

__all__ = ["draw_comparison", "figure", "save"]

COLOURS = {"A": "#1f6feb", "B": "#c2570c"}


def figure(rows: int, columns: int, size: tuple[float, float], call: str) -> tuple[Any, Any]:
    """Return a figure and its axes, drawn without a display.

    Raises:
        PolicyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolicyError(f"{call}: a picture needs matplotlib. Install it: pip install 'xamp[debug]'.") from error
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots(rows, columns, squeeze=False)


def save(made: Any, path: str | Path, call: str) -> None:
    """Write a figure; the end of the name says in which format.

    Raises:
        PolicyError: the file cannot be written, or there is no such format.
    """
    try:
        made.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{call}: the picture cannot be written: {error}") from error


def draw_comparison(found: Comparison, path: str | Path) -> None:
    """Draw loss, the first series that parts, and the differences of modules over the steps."""
    call = f"compare(png={str(path)!r})"
    made, axes = figure(2, 2, (12.5, 8.5), call)
    _lines(axes[0][0], found, Key("loss"), "Loss")
    shown = next((p.key for p in found.partings if p.key.kind != "loss"), None)
    if shown is None:
        shown = next((key for key in found.series_a if key.kind == "gradient"), Key("loss"))
    _lines(axes[0][1], found, shown, str(shown).capitalize())
    _map(made, axes[1][0], differences(found, "activation"), "Results of modules: relative difference")
    _map(made, axes[1][1], differences(found, "update"), "Updates: relative difference")
    told = found.heading + ("" if found.first is None else f": {found.first}")
    made.suptitle(told if len(told) < 110 else told[:107] + "...", fontsize=13, fontweight="bold")
    save(made, path, call)


def _lines(axis: Any, found: Comparison, key: Key, title: str) -> None:
    values: list[float] = []
    for name, series in (("A", found.series_a), ("B", found.series_b)):
        points = sorted(series.get(key, {}).items())
        style = {
            "color": COLOURS[name],
            "linestyle": "-" if name == "A" else "--",
            "marker": "." if len(points) < 40 else "",
        }
        axis.plot([step for step, _ in points], [value for _, value in points], label=name, **style)
        values += [value for _, value in points if math.isfinite(value)]
    if values and min(values) > 0 and max(values) / min(values) > 50:
        axis.set_yscale("log")
    if found.first is not None:
        axis.axvline(found.first.step, color="#b3261e", linestyle=":", linewidth=1.2)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend()


def _map(made: Any, axis: Any, rows: Sequence[tuple[str, Mapping[int, float]]], title: str) -> None:
    axis.set_title(title, fontsize=11)
    steps = sorted({step for _, points in rows for step in points})
    if not steps:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "nothing to show", ha="center", transform=axis.transAxes)
        return
    rows = rows[:40]
    grid = [[_shade(points.get(step)) for step in steps] for _, points in rows]
    shown = axis.imshow(grid, aspect="auto", vmin=-4, vmax=0, cmap="YlOrRd", interpolation="nearest")
    axis.set_yticks(range(len(rows)), [name[-28:] for name, _ in rows], fontsize=8)
    stride = max(1, len(steps) // 8)
    axis.set_xticks(range(0, len(steps), stride), [str(step) for step in steps[::stride]])
    axis.set_xlabel("step")
    made.colorbar(shown, ax=axis, label="log10")


def _shade(value: float | None) -> float:
    if value is None or math.isnan(value):
        return math.nan
    return 0.0 if not math.isfinite(value) else math.log10(max(value, 1e-4))
