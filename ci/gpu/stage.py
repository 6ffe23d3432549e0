"""What a stage is, and the commands of one that runs tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence

__all__ = ["FILE", "Stage", "Step", "is_there", "pytest_step", "python"]

FILE = "{file}"
"""In a command: the file into which it writes what it found, as JSON."""
_PLUGINS = {"xdist": "xdist", "hypothesispytest": "_hypothesis_pytestplugin"}
"""Plugins of pytest, by name, with their modules. Others that are installed take no part: ``runner.surroundings``."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a stage.

    Attributes:
        name: tells it from the stage's others.
        command: its words; :data:`FILE` stands for a file.
        needs: modules without which it is left out.
        accepts: exit codes that are no failure.
        says: what an exit code means, for the table; of one that is no failure, too.
        tests: it writes each test's outcome into the log, and leaves out those that passed when it is run again.
    """

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    accepts: Sequence[int] = (0,)
    says: Mapping[int, str] = dataclasses.field(default_factory=dict)
    tests: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that belong together.

    Attributes:
        name: how it is called.
        what: what it does, in a few words.
        limit: seconds it may take on a card.
        steps: its commands, in order.
        lacks: why it is left out; empty: it is not.
    """

    name: str
    what: str
    limit: float
    steps: Sequence[Step]
    lacks: str = ""

    @property
    def tests(self) -> bool:
        """Whether a command of it writes each test's outcome into the log."""
        return any(step.tests for step in self.steps)


def python(module: str) -> list[str]:
    """The words that run a module."""
    return [sys.executable, "-m", module]


def pytest_step(words: Sequence[str], jobs: int) -> Step:
    """The step that runs tests, and writes each one's outcome into the log.

    Args:
        words: what pytest gets besides.
        jobs: how many workers share the tests, where xdist is there.
    """
    names = ["ci.gpu.keep", *(name for name, module in _PLUGINS.items() if is_there(module))]
    plugins = [word for name in names for word in ("-p", name)]
    workers = ["-n", str(jobs), "--dist=worksteal"] if "xdist" in names and jobs > 1 else []
    says = {2: "interrupted, or a file cannot be imported", 4: "pytest does not know an option"}
    # 5: nothing was left to do.
    command = [*python("pytest"), *plugins, *workers, "-q", *words]
    return Step("tests", command, ["pytest"], (0, 1, 5), says, tests=True)


def is_there(module: str) -> bool:
    """Whether a module can be imported, by its name."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it
        return False
