"""Line up two runs that xamp.trace recorded, and find the first step and module where they part beyond noise.

A and B are files of xamp.trace: a run on a GPU and one on an NPU, at O0 and at O1, under two versions of torch. Noise
is what the lower dtype of the two can cause; --noise C takes it from a third run, which repeats A and is right. Exit
codes: 0 they are the same within noise, 1 they part or both have inf or nan to the end, 2 wrong use: a file that is no
trace, nothing in common.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xamp.errors import PolicyError, XampError
from xamp.registry.registry import require_torch

if TYPE_CHECKING:
    from xamp.debug.alignment import Comparison

__all__ = ["add_arguments", "run"]

_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xamp compare``."""
    parser.add_argument("a", metavar="A", help="a file of xamp.trace")
    parser.add_argument("b", metavar="B", help="the file to compare with it")
    parser.add_argument("--noise", metavar="C", help="a third run, which repeats A: what differs there is noise")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write one page with plots, which needs no other file"
    )
    parser.add_argument("--png", metavar="FILE", type=Path, help="write a picture (needs matplotlib: xamp[debug])")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the answer for a machine; - prints it")


def run(args: argparse.Namespace) -> int:
    """Compare two traces. Return 0 where they are the same, 1 where they are not, 2 for wrong use."""
    try:
        require_torch("xamp compare")
        from xamp.debug.alignment import compare
        from xamp.debug.trace_file import read

        found = compare(read(args.a), read(args.b), None if args.noise is None else read(args.noise))
        _write_all(found, args)
    except XampError as error:
        print(f"xamp compare: {error}", file=sys.stderr)
        return 2
    print(found.to_json() if str(args.json) == "-" else _text(found), flush=True)
    return int(not found.same)


def _write_all(found: Comparison, args: argparse.Namespace) -> None:
    if args.html is not None:
        from xamp.debug.page import page

        _write(args.html, page(found))
    if args.png is not None:
        from xamp.debug.picture import draw_comparison

        draw_comparison(found, args.png)
    if args.json is not None and str(args.json) != "-":
        _write(args.json, found.to_json() + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolicyError(
            f"{str(path)!r} cannot be written: {error.strerror}. Name a file in a folder that is there."
        ) from error


def _text(found: Comparison) -> str:
    lines = [f"A  {found.a.path}: {found.a.about}", f"B  {found.b.path}: {found.b.about}"]
    if not found.same:
        lines.append(found.heading)
        lines += [f"  step {p.step}  {p}" for p in found.partings[:_SHOWN]]
        more = len(found.partings) - _SHOWN
        lines += [f"  and {more} more"] if more > 0 else []
    lines.append(found.meaning())
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join([*lines, f"noise: {found.noise}; {found.steps} steps are in both"])
