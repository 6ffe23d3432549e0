"""The core names no device: fails where a file of xamp/ does, outside the places whose business devices are.

Docstrings and comments may name them; a string that is a device's or its communication library's name, and an attribute
such as ``torch.cuda``, may not stand in code.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

DEVICES = {"cuda", "npu", "xpu", "mps"}
NAMES = DEVICES | {"hccl", "nccl", "xccl"}
# The table of built-in backends, the backends, and what exists to speak of devices: the drop-in, the codemod, commands.
EXEMPT = ("registry/registry.py", "apex", "backends", "cli", "port")


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line number and name of each device named in code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in NAMES:
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in DEVICES and ast.unparse(node.value) == "torch":
            yield node.lineno, f"torch.{node.attr}"


def main() -> int:
    """Checks every file of the core; returns the exit status."""
    core = pathlib.Path(__file__).resolve().parent.parent / "xamp"
    status = 0
    for path in sorted(core.rglob("*.py")):
        inside = path.relative_to(core)
        if inside.parts[0] in EXEMPT:
            continue
        for line, name in offences(ast.parse(path.read_text(encoding="utf-8"))):
            print(f"xamp/{inside}:{line}: {name} in the core; ask the backend, or the registry, instead")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
