"""The names of ``xamp.debug``, whose modules are imported when a name is asked for.

Covers: xamp.debug.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xamp import debug
from xamp.errors import BackendUnavailable


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_name_has_a_home_which_is_no_submodule_of_its_name() -> None:
    folder = Path(debug.__file__).parent
    submodules = {entry.stem for entry in folder.glob("*.py")}
    assert set(debug._HOME_OF) == set(debug.__all__)
    assert set(debug._HOME_OF.values()) < submodules
    assert not submodules & set(debug.__all__)


def test_the_package_imports_none_of_its_modules() -> None:
    code = "import sys, xamp.debug; print([m for m in sys.modules if m.startswith('xamp.debug.') or m == 'torch'])"
    assert run(code) == "[]\n"


def test_a_name_is_the_same_object_however_it_is_asked_for() -> None:
    from xamp.debug import alignment, profiling

    for _ in range(2):
        assert (debug.compare, debug.profile) == (alignment.compare, profiling.profile)
    assert set(debug.__all__) <= set(dir(debug))
    assert "alignment" not in dir(debug)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'xamp\.debug' has no attribute 'profil'"):
        debug.profil  # type: ignore[attr-defined]  # noqa: B018


def test_without_torch_a_name_says_what_to_install() -> None:
    name = BackendUnavailable.__name__
    code = f"""
import sys
sys.modules['torch'] = None
try:
    from xamp.debug import profile
except Exception as error:
    print(type(error).__name__ == {name!r}, 'xamp.debug.profile needs torch' in str(error))
"""
    assert run(code) == "True True\n"
