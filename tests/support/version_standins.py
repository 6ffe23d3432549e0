"""A program that passes for a Python: it says which version it is, makes environments, and installs in no time.

What it is not asked for the versions' sake goes to the real Python. In place of the tests of this project it runs those
of the folder that ``STANDIN_TESTS`` names. Each call is a line of the file ``calls`` beside the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import measuring
from ci_scripts import ROOT

__all__ = ["call", "calls", "environment", "interpreter"]

_PROGRAM = """#!/usr/bin/env bash
here=$(dirname -- "$0")
echo "$*" | tr '\\n' ' ' >>{log!r}; echo >>{log!r}
case "$*" in
*ensurepip*) echo {version} ;;
*'version("torch")'*) echo "{version} $(cat "$here/torch")" ;;
"-m venv --without-pip "*) exec {real!r} "$@" ;;
"-m venv "*) mkdir -p "$3/bin" && cp -- "$0" "$3/bin/python" && echo none >"$3/bin/torch" ;;
"-m pip index versions torch "*)
    [ -n "${{STANDIN_OFFERED:-}}" ] || {{ echo "no index answers" >&2; exit 1; }}
    echo "torch (some)"; echo "Available versions: $STANDIN_OFFERED" ;;
"-m pip install "*)
    case "$*" in *"${{STANDIN_REFUSED:-no such word}}"*) echo "no such package" >&2; exit 1 ;; esac
    for word; do case $word in torch==*) echo "${{word#torch==}}" >"$here/torch" ;; esac; done ;;
"-m compileall "* | examples/demo.py*) ;;
"-m pytest "*)
    [ -d "${{STANDIN_TESTS:-}}" ] || {{ echo "no tests are meant to run here" >&2; exit 9; }}
    words=()
    for word; do
        case $word in tests/* | --device=* | --tier=*) ;; *) words+=("$word") ;; esac
    done
    exec {real!r} "${{words[@]}}" -c /dev/null --rootdir "$STANDIN_TESTS" -p no:cacheprovider "$STANDIN_TESTS" ;;
*) exec {real!r} "$@" ;;
esac
"""


def call(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call ``ci/versions.sh``. Its environments are in a folder, and no Python of pyenv is seen."""
    kept = {name: value for name, value in measuring.without(os.environ).items() if not name.startswith("XAMP_")}
    told = {"XAMP_VERSIONS": str(folder), "PYTHON": sys.executable, "PYENV_ROOT": str(folder), **variables}
    command = [str(ROOT / "ci" / "versions.sh"), *words]
    return subprocess.run(command, env={**kept, **told}, capture_output=True, text=True, check=False)


def interpreter(path: Path, version: str) -> Path:
    """Make such a program. ``path`` is where it goes, ``version`` is what it says of itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.parent / "calls"
    path.write_text(_PROGRAM.format(log=str(log), version=version, real=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


def environment(folder: Path, version: str, torch: str) -> Path:
    """Make an environment that has such a program for its Python, and a version of torch."""
    (interpreter(folder / "bin" / "python", version).parent / "torch").write_text(f"{torch}\n", encoding="utf-8")
    return folder


def calls(path: Path) -> list[str]:
    """How a program was called, and those that were made from it."""
    log = path.parent / "calls"
    return log.read_text(encoding="utf-8").splitlines() if os.path.exists(log) else []
