"""The text of ``xamp --help``: the commands in groups with a line for each, then examples."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

__all__ = ["EXAMPLES", "GROUPS", "Parser"]

GROUPS: Mapping[str, Mapping[str, str]] = {
    "this machine": {
        "doctor": "what works here, and what to do about the rest",
        "policy": "in which dtype each operator runs on a device",
    },
    "your script": {
        "port": "rewrite scripts that name CUDA, Apex or Ascend",
        "run": "run a script as it is on the device in use",
        "emulate": "run a command where a device is emulated",
    },
    "results": {
        "compare": "find where two recorded runs part",
        "conformance": "check that a device does what each level means",
    },
    "your shell": {
        "completion": "print what completes these words in bash, zsh or fish",
    },
}
"""The commands by group, each with its line in the help."""

EXAMPLES = {
    "xamp doctor": "what can I train on here?",
    "xamp port train.py": "what would change, as a diff; --write changes it",
    "xamp run --device cpu train.py --epochs 3": "an old script with `from apex import amp`, unchanged",
    "xamp compare gpu.trace npu.trace --html page.html": "why does it not converge there?",
}


class Parser(argparse.ArgumentParser):
    """The parser of ``xamp``. argparse knows no groups of commands, so this one writes its own help."""

    def format_help(self) -> str:
        """Return the whole help."""
        width = max(len(name) for commands in GROUPS.values() for name in commands)
        lines = [f"usage: {self.prog} COMMAND [OPTIONS]", "", self.description or ""]
        for title, commands in GROUPS.items():
            lines += ["", f"{title}:", *(f"  {name:<{width}}  {about}" for name, about in commands.items())]
        lines += ["", "examples:"]
        for command, about in EXAMPLES.items():
            lines += [f"  {command}", f"      {about}"]
        lines += [
            *("", f"{self.prog} COMMAND --help shows the options of a command; {self.prog} --version, the version."),
            "Exit codes: 0 fine, 1 found something, 2 wrong use. NO_COLOR=1 leaves colours out.",
        ]
        return "\n".join(lines) + "\n"
