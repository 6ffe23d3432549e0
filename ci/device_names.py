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
# Exact paths below xamp/; what ends in a slash is a folder. The tables of operators and of built-in backends, the
# backends; and what looks for these names in scripts, to rewrite them (port) or to redirect them (run).
_PORT = (
    "__init__",
    "backend_names",
    "branches",
    "comparisons",
    "device_method",
    "device_text",
    "map_location",
    "remarks",
)
_RUN = ("ascend", "devices", "handlers", "ranks", "redirect", "site", "table")
EXEMPT = (
    *("casting/ops/table.py", "registry/registry.py", "backends/"),
    *("port/magics.py", "port/owners.py", "port/places.py"),
    *("port/other/packages.py", "port/other/values.py"),
    *(f"port/rules/{name}.py" for name in (*_PORT, "torch_amp", "torch_cuda")),
    *(f"run/{name}.py" for name in _RUN),
)


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line number and name of each device named in code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in NAMES:
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in DEVICES and ast.unparse(node.value) == "torch":
            yield node.lineno, f"torch.{node.attr}"


def exempt(inside: pathlib.PurePosixPath) -> bool:
    """Whether a file, by its path below xamp/, may name devices."""
    path = inside.as_posix()
    return any(path.startswith(each) if each.endswith("/") else path == each for each in EXEMPT)


def found(core: pathlib.Path) -> Iterator[str]:
    """Yields a line for each device that a file below ``core`` names, and must not."""
    for path in sorted(core.rglob("*.py")):
        inside = pathlib.PurePosixPath(path.relative_to(core).as_posix())
        if not exempt(inside):
            for line, name in offences(ast.parse(path.read_text(encoding="utf-8"))):
                yield f"xamp/{inside}:{line}: {name} in the core; ask the backend, or the registry, instead"


def main() -> int:
    """Checks every file of the core; returns the exit status."""
    status = 0
    for line in found(pathlib.Path(__file__).resolve().parent.parent / "xamp"):
        print(line)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
