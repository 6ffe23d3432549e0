"""Each test file names at its top, after ``Covers:``, what it is about; each module of the core is named by one.

Covers: tests/**/test_*.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ci_scripts import ROOT

BOXES = "casting distributed onepass plans registry scaling sessions torch_compat values"


def named(path: Path) -> list[str]:
    """What a test file says that it covers: modules by their dotted names, other files by their paths."""
    head = path.read_text(encoding="utf-8").partition("\nfrom __future__")[0]
    found = re.search(r"\n\nCovers: (.+)\.\Z", ast.get_docstring(ast.parse(head)) or "", re.DOTALL)
    return re.split(r",\s", found[1]) if found else []


def files(name: str) -> list[Path]:
    """The files of such a name, in which an asterisk stands for anything."""
    module = [] if "/" in name else [name.replace(".", "/") + end for end in (".py", "/__init__.py")]
    return [path for pattern in [name, *module] for path in ROOT.glob(pattern) if path.is_file()]


NAMED = {str(path.relative_to(ROOT)): named(path) for path in sorted(ROOT.glob("tests/**/test_*.py"))}


def test_each_file_names_what_there_is() -> None:
    wrong = [path for path, names in NAMED.items() if not names or not all(map(files, names))]
    assert not wrong, f"their Covers: is missing, or names what is not there: {', '.join(wrong)}"


def test_each_module_of_the_core_is_named() -> None:
    core = {*ROOT.glob("xamp/*.py"), *(path for box in BOXES.split() for path in ROOT.glob(f"xamp/{box}/**/*.py"))}
    core -= {path for names in NAMED.values() for name in names for path in files(name)}
    starts = {path for path in core if path.name == "__init__.py"}
    core -= {path for path in starts if not re.search(r"(?m)^(class|def) ", path.read_text(encoding="utf-8"))}
    missed = sorted(str(path.relative_to(ROOT)) for path in core)
    assert not missed, f"no test file covers {', '.join(missed)}"
