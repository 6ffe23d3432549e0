"""Launching as people did: the launchers of torch, ``--local_rank``, and child processes of the script."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xamp.run.patches import Patches
from xamp.run.report import Report

__all__ = ["LAUNCHERS", "Settings", "importable", "launcher_words", "pass_local_rank", "reach_children"]

LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")
_OPTIONS = ("--local_rank", "--local-rank")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of ``xamp run``, as its child processes get them.

    Attributes:
        pretend: whether to pretend that CUDA is there.
        prefer: ``"real"`` or ``"xamp"``, see :func:`xamp.apex.install`.
        folder: where child processes leave what they counted; None where nobody collects it.
    """

    pretend: bool = False
    prefer: str = "real"
    folder: str | None = None

    def words(self) -> list[str]:
        """The options as words of a command line; the device stands in the environment."""
        return [*(["--pretend-cuda"] if self.pretend else []), *(["--prefer", "xamp"] if self.prefer == "xamp" else [])]


def launcher_words(module: str, words: Sequence[str], settings: Settings) -> list[str]:
    """The arguments of a launcher of torch, changed so that each rank is a ``xamp run`` of the script.

    Args:
        module: one of ``LAUNCHERS``.
        words: the arguments as given.
        settings: the options for the ranks.
    """
    from torch.distributed import launch, run

    parser = run.get_args_parser()
    if module == LAUNCHERS[0]:
        parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    given = parser.parse_args(list(words))
    script = [given.training_script, *given.training_script_args]
    own = list(words[: len(words) - len(script)])
    if given.no_python:
        return list(words)
    # xamp run itself passes --local_rank to a script that declares it, in the spelling that it declares.
    own += ["--use_env"] if module == LAUNCHERS[0] and hasattr(launch, "parse_args") else []
    if not given.module:
        own.append("--module")
    return [*own, "xamp", "run", *settings.words(), *(["-m"] if given.module else []), *script]


def importable() -> None:
    """Let child processes import xamp where it is not installed but only on this process's path."""
    root = str(Path(sys.modules["xamp"].__file__ or "").parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths and "site-packages" not in root:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), root])


def pass_local_rank(patches: Patches, report: Report) -> None:
    """Pass ``--local_rank`` from LOCAL_RANK to a script that declares it, as ``torch.distributed.launch`` did."""
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: Any, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        rank = os.environ.get("LOCAL_RANK")
        if rank is not None and (args is None or list(args) == sys.argv[1:]):
            args = _with_rank(self, sys.argv[1:], rank, report)
        return original(self, args, *rest, **kwargs)

    patches.replace(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _with_rank(parser: Any, words: list[str], rank: str, report: Report) -> list[str]:
    declared = [option for option in _OPTIONS if option in parser._option_string_actions]
    if not declared:
        return words
    given = [word for word in words if word.partition("=")[0] in _OPTIONS]
    if not given:
        report.note("launch", f"{declared[0]} from LOCAL_RANK", "int(os.environ['LOCAL_RANK'])")
        return [f"{declared[0]}={rank}", *words]
    spelled = [
        f"{declared[0]}{''.join(word.partition('=')[1:])}"
        if word in given and word.partition("=")[0] not in declared
        else word
        for word in words
    ]
    if spelled != words:
        report.note("launch", f"{given[0].partition('=')[0]} spelled {declared[0]}", "int(os.environ['LOCAL_RANK'])")
    return spelled


class _Child:
    """Stands in what a parent sends to a new process: reading it starts the redirection there."""

    def __init__(self, start: Callable[[Settings], None], settings: Settings) -> None:
        self.start, self.settings = start, settings

    def __reduce__(self) -> tuple[Any, ...]:
        return self.start, (self.settings,)


def reach_children(patches: Patches, settings: Settings, report: Report, start: Callable[[Settings], None]) -> None:
    """Redirect in the processes that the script starts by multiprocessing too, and collect what they counted.

    Args:
        patches: what is put in place.
        settings: for the child processes.
        report: of this process, which a forked one inherits.
        start: called in a child process; it is found by name there.
    """
    original = multiprocessing.spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "xamp_run": _Child(start, settings)}

    patches.replace(multiprocessing.spawn, "get_preparation_data", get_preparation_data)
    multiprocessing.util.register_after_fork(report, _after_fork)


def _after_fork(report: Report) -> None:
    report.clear()
    multiprocessing.util.Finalize(None, report.leave, exitpriority=0)
