"""Trains two networks at every level that this machine's best device supports; shows each level's quality and cost.

Run ``ci/demo.sh``, which installs all that the demo needs; or ``pip install 'xamp[torch,demo]'`` and run this file. The
demo uses the best device that works here; ``XAMP_DEVICE=cpu`` selects another one.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

try:
    import torch
    from demo_report import draw, table
    from demo_tasks import Task, checkerboard, digits
    from demo_train import Run, train
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    import xamp
except ModuleNotFoundError as error:
    sys.exit(
        f"The demo needs {error.name}, which is not installed here. Run ci/demo.sh, which installs all it needs into "
        ".venv, or: pip install 'xamp[torch,demo]'"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demo."""
    # Without a terminal rich assumes 80 columns, fewer than the table needs.
    console = Console(width=None if sys.stdout.isatty() else 140)
    show_log(console)
    started = time.perf_counter()
    device = xamp.device()
    name, levels = describe(device)
    options = parse(arguments, device, levels)
    title = f"xamp {xamp.__version__} on {name} ({device.type}, torch {torch.__version__})"
    console.print(f"[bold]{title}[/bold]: levels {', '.join(options.levels)}")
    console.print(
        f"checkerboard {options.size} x {options.size}, {options.steps} steps; digits, {options.epochs} epochs"
    )

    tasks = (checkerboard(options.size, options.steps, device), digits(options.epochs, device))
    runs = run_all(tasks, options.levels, device, console)
    console.print()
    console.print(table(runs, title))
    draw(runs, title, options.out)
    console.print(f"saved {options.out} after {time.perf_counter() - started:.0f} s")


def parse(arguments: Sequence[str] | None, device: torch.device, levels: Sequence[str]) -> argparse.Namespace:
    """Reads the command line. With the default sizes two CPU cores need about a minute."""
    on_cpu = device.type == "cpu"  # fp16 convolutions are slow on a CPU, often 20 times as slow as fp32
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--levels", nargs="+", default=list(levels), choices=levels, metavar="LEVEL", help=f"of {', '.join(levels)}")
    add(
        "--size",
        type=positive,
        default=32 if on_cpu else 512,
        help="pixels along a side of the checkerboard (%(default)s)",
    )
    add("--steps", type=positive, default=50 if on_cpu else 300, help="steps on the checkerboard (%(default)s)")
    add("--epochs", type=positive, default=5, help="epochs on the digits (%(default)s)")
    add("--out", type=pathlib.Path, default=pathlib.Path("xamp-demo.png"), help="the picture (%(default)s)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """An integer above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def describe(device: torch.device) -> tuple[str, tuple[str, ...]]:
    """The name of ``device`` and the levels that it supports, from the report of its backend."""
    for report in xamp.available_backends():
        if report.usable and report.capabilities and device.type in report.device_types:
            name = report.devices[device.index or 0] if report.devices else device.type
            return name, report.capabilities.levels
    raise SystemExit(f"no usable backend serves {device}; see: xamp doctor")


def run_all(tasks: Sequence[Task], levels: Sequence[str], device: torch.device, console: Console) -> list[Run]:
    """Trains each task at each level, under a progress display."""
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        overall = progress.add_task("all levels", total=len(levels) * sum(len(task.batches) for task in tasks))
        for task in tasks:
            for level in levels:
                current = progress.add_task(f"{task.name} at {level}", total=len(task.batches))
                run = train(task, level, device, advance(progress, current, overall))
                progress.remove_task(current)
                progress.console.print(
                    f"{task.name} at {level}: {task.metric} {run.result:.4f}, "
                    f"{len(run.losses)} steps in {run.seconds:.1f} s, {run.overflows} of them skipped"
                )
                runs.append(run)
    return runs


def advance(progress: Progress, *bars: TaskID) -> Callable[[], None]:
    """A function that advances each of ``bars`` by one."""

    def on_step() -> None:
        for bar in bars:
            progress.advance(bar)

    return on_step


def show_log(console: Console) -> None:
    """Shows xamp's log (each effective setting, each overflow) above the progress display."""
    logger = logging.getLogger("xamp")
    logger.addHandler(RichHandler(console=console, show_time=False, show_path=False, show_level=False))
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    main()
