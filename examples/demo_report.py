"""The demo's output: one table in the terminal, and the same table below the loss curves in a picture."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import matplotlib
from demo_train import Run
from rich import box
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["draw", "table"]

COLUMNS = ("task", "level", "result", "against\nO0", "ms a\nstep", "memory", "over-\nflows", "final\nscale")
WIDTHS = (0.2, 0.07, 0.11, 0.13, 0.11, 0.12, 0.1, 0.12)  # of the columns, in the picture
CAPTION = (
    "result: final loss, or accuracy on the test images (pt: points) · ms a step: median · "
    "memory: parameters, masters, gradients and optimizer state · each overflow skipped a step"
)
# Okabe and Ito's colours, which colour-blind readers can tell apart; O0, the reference, is grey.
COLOURS = {"O0": "#b0b0b0", "O1": "#e69f00", "O2": "#009e73", "O3": "#d55e00", "O4": "#56b4e9", "O5": "#0072b2"}
DASHES = {"O0": "-", "O1": "-", "O2": "--", "O3": ":", "O4": "-", "O5": "--"}


def table(runs: Sequence[Run], title: str) -> Table:
    """All runs as one table for the terminal."""
    shown = Table(title=title, caption=CAPTION, title_style="bold", caption_justify="left", box=box.HORIZONTALS)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for _, group in by_task(runs):
        for run in group:
            shown.add_row(*cells(run, group), end_section=run is group[-1], style="bold" if run.level == "O0" else None)
    return shown


def draw(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
    """Writes loss curves and table to ``path``."""
    tasks = by_task(runs)
    figure = pyplot.figure(figsize=(13, 5.2 + 0.27 * len(runs)), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    grid = figure.add_gridspec(2, len(tasks), height_ratios=(4.2, 0.7 + 0.27 * len(runs)))
    for column, (task, group) in enumerate(tasks):
        curves(figure.add_subplot(grid[0, column]), task, group)
    below = figure.add_subplot(grid[1, :])
    below.axis("off")
    rows = [cells(run, group) for _, group in tasks for run in group]
    heads = [name.replace("-\n", "").replace("\n", " ") for name in COLUMNS]
    drawn = below.table(rows, colLabels=heads, colWidths=WIDTHS, loc="center", edges="horizontal")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9.5)
    drawn.scale(1, 1.25)
    for (row, column), cell in drawn.get_celld().items():
        cell.set_edgecolor("#d0d0d0")
        cell.get_text().set_horizontalalignment("left" if column < 2 else "right")
        if row == 0 or rows[row - 1][1] == "O0":
            cell.get_text().set_fontweight("bold")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.supxlabel(CAPTION, fontsize=8.5, color="#505050")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def curves(axes: Axes, task: str, runs: Sequence[Run]) -> None:
    """Draws the loss of each run over its steps; O0 is a wide grey line below the others."""
    window = max(1, len(runs[0].losses) // 12) if runs[0].metric == "accuracy" else 1
    for run in runs:
        losses = smooth(run.losses, window)
        width = 6 if run.level == "O0" else 1.8
        axes.plot(
            range(window, window + len(losses)),
            losses,
            label=run.level,
            color=COLOURS.get(run.level),
            linestyle=DASHES.get(run.level, "-"),
            linewidth=width,
        )
    axes.set_yscale("log")
    axes.set_title(task if window == 1 else f"{task} (loss: mean of {window} steps)", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(which="both", color="#ececec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="level", frameon=False, ncols=2)


def cells(run: Run, group: Sequence[Run]) -> list[str]:
    """One row of the table. ``group`` holds all runs of the same task."""
    reference = next((other.result for other in group if other.level == "O0"), None)
    if run.metric == "accuracy":
        result, difference = f"{run.result:.2%}", f"{100 * (run.result - (reference or 0)):+.2f} pt"
    else:
        result, difference = f"{run.result:.4f}", f"{run.result - (reference or 0):+.4f}"
    if run.level == "O0" or reference is None:
        difference = "-"
    return [
        run.task,
        run.level,
        result,
        difference,
        f"{run.step_ms:.2f}",
        memory(run.held_bytes),
        str(run.overflows),
        f"{run.scale:g}" if run.scale < 1e5 else f"{run.scale:.0f}",
    ]


def memory(held: int) -> str:
    """Bytes as a text, in kB or MB."""
    return f"{held / 1e6:.2f} MB" if held >= 1e6 else f"{held / 1e3:.0f} kB"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Running mean over ``window`` values, shorter by ``window - 1``."""
    return [sum(values[start : start + window]) / window for start in range(len(values) - window + 1)]


def by_task(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs grouped by task, in order."""
    return [(task, list(group)) for task, group in itertools.groupby(runs, key=lambda run: run.task)]
