"""The command ``xamp``, also ``python -m xamp``.

A command is a module of its name with a docstring (its help text), ``add_arguments(parser)`` and ``run(args) -> int``,
and has one line in ``_help.GROUPS``. These modules import no torch at module level, so that each command works where
torch does not. Exit codes: 0 fine, 1 found something, 2 wrong use or an output that cannot be written.

Modules: the commands: one module for each command, and modules (``_...``) for their output and files.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import xamp
from xamp.cli._help import GROUPS, Parser
from xamp.cli._output import flush, open_closed_streams, output_failed, tells_of_output

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None means those of this process.

    Returns:
        The exit code: 0 fine, 1 found something, 2 wrong use or an output that cannot be written, 130 interrupted, 141
        where the reader of the output has left.
    """
    if argv is None:
        open_closed_streams()
    try:
        code = _run(argv)
        flush()
    except OSError as error:
        if not tells_of_output(error):
            raise
        code = output_failed(error)
    return code


def _run(argv: list[str] | None) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # raised after --help, --version and wrong use; the text is already printed
        return stop.code if isinstance(stop.code, int) else 0
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    args.parser = parser
    args.own_process = argv is None  # else a caller goes on in this process when the command has ended
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130  # the exit code that a shell gives a process ended by SIGINT: 128 + 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="xamp", description=(xamp.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"xamp {xamp.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name in (name for group in GROUPS.values() for name in group):
        module = importlib.import_module(f"xamp.cli.{name}")
        command = commands.add_parser(name, description=(module.__doc__ or "").strip())
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
