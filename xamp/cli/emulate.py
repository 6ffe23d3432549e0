"""Run a command where a device is emulated: `xamp emulate ascend:Ascend910A --devices 2 -- python train.py`.

NAME is a kind of device that a backend can emulate; the part after the colon is a chip. The vendor's own package runs
unmodified, and the CPU computes the operators. It needs a build of torch for CPUs or CUDA, of a version for which that
package exists, and a C compiler. docs/ascend.md says what this proves and what it cannot prove. The exit
code is that of the command, or 2 where the emulation cannot be set up.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from xamp.errors import XampError

__all__ = ["add_arguments", "run"]

_START = "XAMP_EMULATED_START"  # what a Python of the command calls first
_Run = Callable[..., int]  # (chip, devices, command), and what :func:`_chosen` gives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp emulate``."""
    parser.add_argument("what", metavar="NAME[:CHIP]", help="what is emulated, such as ascend or ascend:Ascend910A")
    _add_options(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, after --")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices (default: 1)")
    parser.add_argument(
        "--strict", action="store_true", help="refuse what no source shows a real device to take (docs/ascend.md)"
    )
    parser.add_argument(
        "--wheel",
        action="append",
        default=[],
        metavar="FILE",
        help="take the vendor's package, or one that it needs, from this wheel and not from the network (repeatable; "
        "what was taken is kept)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Return its exit code, or 2 for wrong use and where the emulation cannot be set up."""
    name, _, chip = args.what.partition(":")
    known = _emulations()
    if name not in known:
        return _refuse(f"{args.what!r}: nothing of that name can be emulated. Choose one of {', '.join(known)}.")
    command = _command(args)
    if not command:
        return _refuse(f"no command given. Write it after --: xamp emulate {args.what} -- python train.py")
    emulate: _Run = pkgutil.resolve_name(known[name])
    # In every Python of the command, `import apex` finds xamp.apex, unless an Apex is installed.
    os.environ[_START] = "xamp.apex:install"
    try:
        return emulate(chip, args.devices, command, **_chosen(args))
    except XampError as error:
        return _refuse(str(error))
    finally:
        del os.environ[_START]


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The options that only some emulations know, where they are given."""
    chosen: dict[str, Any] = {"wheels": args.wheel, "strict": args.strict}
    return {name: value for name, value in chosen.items() if value}


def _command(args: argparse.Namespace) -> list[str]:
    """The words of the command. Parses into ``args`` the options between NAME and ``--``, which argparse left over."""
    words: list[str] = args.words
    if not words or not words[0].startswith("-"):
        return words
    end = words.index("--") if "--" in words else len(words)
    late = argparse.ArgumentParser(prog=f"xamp emulate {args.what}", add_help=False)
    _add_options(late)
    late.parse_args(words[:end], namespace=args)
    return words[end + 1 :]


def _emulations() -> dict[str, str]:
    """The functions that emulate, as ``"package.module:function"`` by the name of what they emulate."""
    from xamp.registry.registry import REGISTRY

    return {name: target for spec in REGISTRY.specs() for name, target in spec.emulations}


def _refuse(text: str) -> int:
    print(f"xamp emulate: {text}", file=sys.stderr)
    return 2
