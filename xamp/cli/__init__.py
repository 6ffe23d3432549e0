"""The command ``xamp``, also ``python -m xamp``.

A command is a module with a docstring (its help text), ``add_arguments(parser)`` and ``run(args) -> int``, and has one
line in ``_COMMANDS``. These modules import no torch at module level, so that each command works where torch does not.
Exit codes: 0 fine, 1 found something, 2 wrong use or an output that cannot be written.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import xamp
from xamp.cli._output import flush, open_closed_streams, output_failed, tells_of_output

__all__ = ["main"]

_COMMANDS = {
    "compare": "xamp.cli.compare",
    "conformance": "xamp.cli.conformance",
    "doctor": "xamp.cli.doctor",
    "emulate": "xamp.cli.emulate",
    "policy": "xamp.cli.policy",
    "run": "xamp.cli.run",
    "port": "xamp.cli.port",
}


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
    args.own_process = argv is None  # else a caller goes on in this process when the command has ended
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130  # the exit code that a shell gives a process ended by SIGINT: 128 + 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xamp", description=(xamp.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"xamp {xamp.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module_name in _COMMANDS.items():
        module = importlib.import_module(module_name)
        about = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=about.partition("\n")[0].rstrip("."), description=about)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
