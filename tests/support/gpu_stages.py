"""Stages that only seem to be work, for the runner of ci/gpu: ``python -m gpu_stages FOLDER [WORDS]`` runs some."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ci_scripts import ROOT

sys.path.insert(0, str(ROOT))
from ci.gpu.__main__ import main
from ci.gpu.stage import Stage, Step
from ci.gpu.table import Plan

__all__ = ["NAME", "does", "pytest_stage", "table"]

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
NAME = "gpu-*-rehearsal"


def does(name: str, *codes: str, limit: float = 60.0, lacks: str = "") -> Stage:
    """A stage whose commands are the programs ``codes``."""
    steps = [Step(f"{name} {index}", [sys.executable, "-c", code]) for index, code in enumerate(codes)]
    return Stage(name, f"does {name}", limit, steps, lacks)


def pytest_stage(folder: Path, *options: str) -> Stage:
    """A stage of the tests in a folder."""
    plain = ["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    words = [sys.executable, "-m", "pytest", "-p", "ci.gpu.keep", "-q", *options, *plain]
    return Stage("tests", "the tests", 120.0, [Step("tests", words, ["pytest"], (0, 1, 5), tests=True)])


def table(*stages: Stage) -> Callable[[Plan], Sequence[Stage]]:
    """A table of stages, as ``main`` takes it."""
    return lambda plan: stages


def _slow(folder: Path) -> list[Stage]:
    """One that ends at once, and one that ends when a file is there; both leave word that they ran."""
    words = f"open({str(folder / 'ran')!r}, 'a').write("
    wait = f"""
import os, time
{words}f"slow {{os.getpid()}}\\n")
while not os.path.exists({str(folder / "go")!r}):
    time.sleep(0.02)
"""
    return [does("quick", f"{words}'quick\\n')"), does("slow", wait), does("last", f"{words}'last\\n')")]


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(main(["--rehearse", "--out", str(here), *sys.argv[2:]], table(*_slow(here))))
