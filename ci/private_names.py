"""Counts the private names of torch that the package uses; fails where a module that is no adapter has one.

It fails too where the core, what a training process loads, has more than 50, and where the table of these names
(xamp/torch_compat/torch_private/names.py) and the adapters differ: a name without a line, a line without a name, other
packages that use it, or none.

    python ci/private_names.py            # checks that, and the count in docs/architecture.md
    python ci/private_names.py --write    # puts the count into docs/architecture.md
    python ci/private_names.py --list     # prints each name, with the modules that have it

The rule: a private name is a dotted name that begins with ``torch`` and has a later part that begins with one
underscore (two are Python's own). It is found in the code of xamp/ and backends/, not in docstrings and comments,

- as it is written, ``torch._C._x``, also where an import or an assignment gave its beginning another name: after
  ``import torch._C as c``, ``from torch import _C as c`` or ``c = torch._C`` it is ``c._x``;
- as it is looked up, ``sys.modules["torch.x"]._y``;
- as it is imported: ``import torch._x``, ``from torch.y import _x``, ``from torch._y import x``;
- as a text that ``getattr``, ``hasattr``, ``setattr`` or ``delattr`` gets after a dotted name, ``hasattr(torch, "_x")``
- as a text that is such a name and no more, as ``importlib.import_module`` and ``sys.modules`` take it:
  ``"torch._dynamo.trace_rules"``, or ``"torch.utils._device:DeviceContext"``.

A name counts once, as far as it is written: ``torch._C`` and ``torch._C._x`` are two. What xamp itself puts there
(``_xamp...``) does not count, nor do the names that torch_npu adds (``torch.npu``, ``torch.ops.npu``), nor the texts of
tables that say what scripts may contain. Names that begin at an object (``tensor._version``) are not seen.
"""

from __future__ import annotations

import pathlib
import re
import runpy
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.adapters import uses
from ci.dotted_names import names

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# Paths below the root; what ends in a slash is a folder.
ADAPTERS = (
    "xamp/torch_compat/torch_private/",
    "backends/torch_private.py",
    "backends/npu/emulation/torch_private.py",
)
TABLE = "xamp/torch_compat/torch_private/names.py"  # of the names, as texts: it uses none
OF_SCRIPTS = ("xamp/run/ages.py", "xamp/port/rules/")
_COUNT = re.compile(r"\d+ private names of torch in \d+ modules, \d+ of them in the core")
CORE = frozenset(
    {
        "accel",
        "casting",
        "contract",
        "distributed",
        "onepass",
        "plans",
        "policy",
        "registry",
        "scaling",
        "sessions",
        "torch_compat",
        "values",
    }
)
MOST = 50  # names that the core has


def is_in(path: str, places: Sequence[str]) -> bool:
    """Whether a path below the root is one of ``places``, or in a folder that is."""
    return any(path.startswith(each) if each.endswith("/") else path == each for each in places)


def users(root: pathlib.Path) -> dict[str, dict[str, int]]:
    """Each private name in the package below ``root`` -> the files that have it, by path, with the first line."""
    found: dict[str, dict[str, int]] = {}
    for path in _files(root):
        for line, name in names(path.read_text(encoding="utf-8")):
            found.setdefault(name, {}).setdefault(path.relative_to(root).as_posix(), line)
    return found


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that the rule is for; xamp/backends is a link to the other folder."""
    found = (path for folder in ("xamp", "backends") for path in sorted((root / folder).rglob("*.py")))
    left_out = ("xamp/backends/", TABLE, *OF_SCRIPTS)
    return [path for path in found if not is_in(path.relative_to(root).as_posix(), left_out)]


def adapter_of(path: str) -> str:
    """The adapter that may name what the file at ``path`` needs."""
    return max((each for each in ADAPTERS if path.startswith(each.rpartition("/")[0])), key=len, default=ADAPTERS[0])


def taken(root: pathlib.Path) -> dict[str, set[str]]:
    """Each private name that an adapter below ``root`` has -> the packages that use it."""
    adapters = {path for path in _files(root) if is_in(path.relative_to(root).as_posix(), ADAPTERS)}
    return uses(root, sorted(adapters), [path for path in _files(root) if path not in adapters])


def table() -> dict[str, tuple[str, ...]]:
    """The table of the names: each with the packages that use it. Reading it imports no torch."""
    return {each.name: tuple(each.used_by.split()) for each in runpy.run_path(str(ROOT / TABLE))["NAMES"]}


def core_names() -> list[str]:
    """The names that a training process needs, without those that are public too."""
    lines = runpy.run_path(str(ROOT / TABLE))["NAMES"]
    return [each.name for each in lines if not each.public and not CORE.isdisjoint(each.used_by.split())]


def disagreements(found: Mapping[str, set[str]], lines: Mapping[str, Sequence[str]]) -> list[str]:
    """What the adapters and the table do not have in common: names, and who uses them."""
    wrong = [f"{name}: an adapter has it, and {TABLE} no line for it" for name in sorted(found.keys() - lines.keys())]
    wrong += [f"{name}: {TABLE} has a line for it, and no adapter has it" for name in lines.keys() - found.keys()]
    for name in sorted(found.keys() & lines.keys()):
        if not found[name]:
            wrong.append(f"{name}: an adapter has it, and nothing uses it")
        elif found[name] != set(lines[name]):
            wrong.append(f"{name}: {TABLE} says {' '.join(lines[name])} use it; {' '.join(sorted(found[name]))} do")
    return wrong


def misplaced(found: dict[str, dict[str, int]]) -> list[str]:
    """A line for each name in a module that is no adapter."""
    return sorted(
        f"{path}:{line}: {name} is private to torch; name it in an adapter ({adapter_of(path)}), with a line in {TABLE}"
        for name, files in found.items()
        for path, line in files.items()
        if not is_in(path, ADAPTERS)
    )


def count(found: dict[str, dict[str, int]]) -> str:
    """The count as docs/architecture.md has it."""
    modules = {path for files in found.values() for path in files}
    return f"{len(found)} private names of torch in {len(modules)} modules, {len(core_names())} of them in the core"


def main(arguments: Sequence[str]) -> int:
    """Checks, writes or lists, as the top of this file says; returns the exit status."""
    found = users(ROOT)
    if "--list" in arguments:
        for name, files in sorted(found.items()):
            print(name, *files)
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in arguments:
        PAGE.write_text(page := _COUNT.sub(count(found), page), encoding="utf-8")
    wrong = [*misplaced(found), *disagreements(taken(ROOT), table())]
    if _COUNT.findall(page) != [count(found)]:
        wrong.append(f"docs/architecture.md must say {count(found)!r}, once: python ci/private_names.py --write")
    if len(core_names()) > MOST:
        wrong.append(
            f"the core has {len(core_names())} private names of torch, and at most {MOST} are allowed: take one out"
        )
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
