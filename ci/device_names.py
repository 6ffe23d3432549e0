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
_PORT = "__init__ backend_names branches comparisons device_method device_text map_location remarks torch_amp"
_RUN = "ascend devices handlers ranks redirect site table"
EXEMPT = (
    *("casting/ops/table.py", "registry/registry.py", "backends/"),
    *("port/magics.py", "port/owners.py", "port/places.py", "port/other/packages.py", "port/other/values.py"),
    *(f"port/rules/{name}.py" for name in (*_PORT.split(), "torch_cuda")),
    *(f"run/{name}.py" for name in _RUN.split()),
)
"""Exact paths below xamp/; what ends in a slash is a folder. The tables of operators and of built-in backends, the
backends; and what looks for these names in scripts, to rewrite them (port) or to redirect them (run)."""


def found(core: pathlib.Path) -> Iterator[str]:
    """A line for each device that a file below ``core`` names, and must not."""
    for path in sorted(core.rglob("*.py")):
        inside = path.relative_to(core).as_posix()
        if not any(inside.startswith(each) if each.endswith("/") else inside == each for each in EXEMPT):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Constant(value=str(text)) if text.partition(":")[0] in NAMES:
                        name = repr(text)
                    case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in DEVICES:
                        name = f"torch.{attr}"
                    case _:
                        continue
                yield f"xamp/{inside}:{node.lineno}: {name} in the core; ask the backend, or the registry, instead"


def main() -> int:
    """Checks every file of the core; returns the exit status."""
    lines = list(found(pathlib.Path(__file__).resolve().parent.parent / "xamp"))
    print("".join(f"{line}\n" for line in lines), end="")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
