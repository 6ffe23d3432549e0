"""Runs as Python starts, in the processes of ``pytest --one-pass``."""

import importlib.util
import sys
from pathlib import Path

for _name in ("on_import", "one_pass_path"):  # by their paths: the folder has names that a program may have, too
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parents[1] / f"{_name}.py")
    assert _spec is not None
    assert _spec.loader is not None
    _module = sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
_module.install()
