"""Runs as Python starts, in the processes of ``pytest --one-pass``."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("one_pass_path", Path(__file__).parents[1] / "one_pass_path.py")
assert _spec is not None
assert _spec.loader is not None
_module = sys.modules["one_pass_path"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.install()
