"""Run an unported script on the device in use: `xamp run --device cpu train.py --epochs 3`, or `-m MODULE`.

`import apex`, `amp_C` and `apex_C` are answered by xamp.apex. What the script asks of CUDA or of an Ascend card is
answered by the device in use, for this process and its children only; at the end stderr lists what was redirected, how
often and where first: that is what to port. docs/run.md says what is redirected and what is not. Options stand before
the script; the exit code is the script's, or 2 where the device asked for is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from xamp.cli._words import named
from xamp.errors import XampError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp run``."""
    parser.add_argument(
        "--device", type=named, metavar="D", help="the device that answers, such as cpu or npu:1 (default: XAMP_DEVICE)"
    )
    parser.add_argument("--pretend-cuda", action="store_true", help="tell the script that CUDA is there, if it insists")
    parser.add_argument(
        "--prefer", choices=("real", "xamp"), default="real", help="which apex, if a real one is installed"
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m"
    )
    parser.add_argument("words", metavar="SCRIPT [ARGS]", nargs=argparse.REMAINDER, help="the script and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script. Return its exit code, or 2 for wrong use and where the device asked for is not there."""
    words = (args.module if args.module is not None else args.words) or []
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        return _refuse("no script given: xamp run train.py, or xamp run -m package.train")
    with contextlib.ExitStack() as at_end:
        if not args.own_process:
            at_end.callback(_restore, dict(os.environ))
        try:
            _use(args.device)
        except XampError as error:
            return _refuse(str(error))
        from xamp.run import script
        from xamp.run.launch import Settings

        settings = Settings(args.pretend_cuda, args.prefer)
        module = args.module is not None
        return script.run(words[0], words[1:], module=module, settings=settings, own_process=args.own_process)


def _use(device: str | None) -> None:
    """Make ``device`` the device in use, of child processes too, and check that it is there."""
    from xamp.registry.registry import require_torch

    require_torch("xamp run")
    from xamp.registry import device_in_use

    if device is not None:
        device_in_use.check(device, f"--device {device}", "Or leave it out for the best one that works.")
        os.environ[device_in_use.DEVICE_VARIABLE] = device
    device_in_use.device()


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _refuse(text: str) -> int:
    print(f"xamp run: {text}", file=sys.stderr)
    return 2
