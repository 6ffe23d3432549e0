"""The pages of the docs: every block of code runs or says why not, every command exists, every name has its place.

Covers: docs/*.md.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs_pages
import pytest
import torch
from docs_pages import DOCS, ELSEWHERE, ROOT
from forked_python import python
from gathering import cases

import xamp
from xamp.cli import _parser

RUN_HERE = [page for page in docs_pages.pages() if page not in ELSEWHERE and docs_pages.sections(page)]
ON_RANKS = [page for page in RUN_HERE if "DistributedDataParallel(" in (ROOT / page).read_text(encoding="utf-8")]
GUIDES = [page for page in RUN_HERE if page not in ON_RANKS]


@pytest.mark.parametrize("page", GUIDES)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    # The blocks name the default compiler, which takes a minute here; that results are equal is tested elsewhere.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    docs_pages.run_page(page, tmp_path)


def test_blocks_on_ranks_run(tmp_path: Path) -> None:
    """In a process of their own, since a DDP outlives its process group."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    paths = os.pathsep.join([str(ROOT / "tests" / "support"), *sys.path])
    done = subprocess.run(
        [python(), docs_pages.__file__, str(tmp_path), *ON_RANKS],
        env={**os.environ, **ranks, "XAMP_DEVICE": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(ON_RANKS) >= 2


def test_blocks_of_other_pages_are_run_by_their_tests() -> None:
    for page, test in ELSEWHERE.items():
        text = (ROOT / test).read_text(encoding="utf-8")
        assert Path(page).name in text or Path(page).stem.capitalize() in text, f"{test} does not name {page}"


def test_blocks_are_run_or_say_why_not() -> None:
    with cases() as case:
        for page, block in ((each, block) for each in docs_pages.pages() for block in docs_pages.blocks(each)):
            with case(page):
                assert block.language in docs_pages.LANGUAGES, block
                if block.language == "sh":
                    assert len(block.reason) > 10, f"a block of commands needs <!-- not run: reason -->\n{block.code}"


def commands(page: str) -> Iterator[list[str]]:
    """The calls of ``xamp`` in a page: lines of blocks, fenced or indented."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = [line for block in re.findall(r"^```sh\n(.*?)^```$", text, re.S | re.M) for line in block.splitlines()]
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    for line in fenced + indented:
        found = re.match(r"(?:python -m )?xamp ([a-z]+(?: [^#]*)?)(?:#.*)?$", line)
        if found:
            yield shlex.split(found[1])


def options(words: list[str]) -> set[str]:
    """The options of a command of ``xamp``, those of its subcommands included."""

    def of(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    yield from of(each)

    (subparsers,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert words[0] in subparsers.choices, f"xamp {words[0]}: there is no such command"
    return set(of(subparsers.choices[words[0]]))


def test_commands_and_their_options_exist() -> None:
    with cases() as case:
        for page, words in ((each, words) for each in docs_pages.pages() for words in commands(each)):
            with case(f"{page}: xamp {shlex.join(words)}"):
                known = options(words)
                if words[0] not in ("run", "emulate"):  # what follows there belongs to the script
                    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


@functools.lru_cache(None)
def texts() -> str:
    """All texts in the code, with a NUL where a value goes."""

    def parts(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(each.value if isinstance(each, ast.Constant) else "\0" for each in node.values)  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("%s", "\0")

    paths = [*(ROOT / "xamp").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    return "\n\n".join(text.replace("`", "'") for path in paths for text in parts(path))


def quoted(page: str) -> list[str]:
    return re.findall(r"^### `(.+)`$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


def test_quoted_messages_are_in_the_code() -> None:
    messages = quoted("docs/troubleshooting.md")
    assert len(messages) >= 40
    with cases() as case:
        for message in messages:
            with case(message):
                if message.isidentifier():
                    assert issubclass(getattr(xamp, message), xamp.XampError)
                    continue
                # Three dots stand for a value, unless they are the text's own, as in scale_loss(...).
                pattern = re.escape(message).replace(re.escape("..."), r"(?:[^\n]{0,60}?|\.\.\.)")
                assert re.search(pattern, texts()) is not None, "no text in the code is this"


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = [name.replace("\\", "") for name in re.findall(r"^### xamp\.(\S+)$", text, re.MULTILINE)]
    assert sorted(listed) == sorted(xamp.__all__)
    for name in xamp.__all__:
        if name not in ("__version__", "apex"):
            assert re.search(rf"^::: xamp\.\S*\b{name}$", text, re.MULTILINE), name
            assert inspect.getdoc(getattr(xamp, name)), f"xamp.{name} has no docstring"


def test_every_argument_of_initialize_is_documented() -> None:
    names = list(inspect.signature(xamp.initialize).parameters)
    docstring = inspect.getdoc(xamp.initialize) or ""
    settings = (DOCS / "settings.md").read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf"^    {name}: ", docstring, re.MULTILINE), f"{name} is not in the docstring"
        assert f"| `{name}` |" in settings, f"{name} is not in docs/settings.md"


def test_every_argument_of_a_public_function_is_documented() -> None:
    for name in xamp.__all__:
        found: Any = getattr(xamp, name)
        if not inspect.isfunction(found):
            continue
        arguments = [
            each
            for each in inspect.signature(found).parameters
            if each not in ("args", "kwargs", "fwd", "bwd", "obj", "fn", "function")
        ]
        docstring = inspect.getdoc(found) or ""
        missing = [each for each in arguments if not re.search(rf"\b{each}\b", docstring)]
        assert not missing, f"xamp.{name} says nothing of {missing}"


MADE_BY_XAMP = ("Average", "NonFinite", "Session", "StepOutcome")
"""Public classes that users do not construct."""


def public_callables() -> Iterator[tuple[str, Any]]:
    """What users may call, by the name that they know: functions, classes, and the methods of classes."""
    from xamp import backend_kit, contract, debug, testing
    from xamp.averages import Average
    from xamp.sessions.session import Session

    found = [(f"xamp.{name}", getattr(xamp, name)) for name in xamp.__all__]
    found += [("xamp.sessions.session.Session", Session), ("xamp.averages.Average", Average)]
    for module in (backend_kit, contract, debug, testing):
        found += [(f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__]
    for name, each in found:
        is_class = isinstance(each, type) and typing.get_origin(each) is None  # Python 3.10 takes an alias for a class
        if hasattr(inspect.unwrap(each), "__code__") or (is_class and each.__name__ not in MADE_BY_XAMP):
            yield name, each
        if not is_class:
            continue
        for key, member in vars(each).items():
            inner = getattr(member, "__func__", getattr(member, "fget", None) or member)
            if not key.startswith("_") and inspect.isfunction(inner):
                yield f"{name}.{key}", inner


def test_every_argument_of_every_method_and_class_is_documented() -> None:
    missing = []
    for name, each in public_callables():
        try:
            parameters = inspect.signature(each).parameters.values()
        except ValueError:  # of a class in C
            continue
        docstring = inspect.getdoc(each) or ""
        if not docstring:
            missing.append(f"{name}: no docstring")
        if inspect.isclass(each):
            docstring += inspect.getdoc(each.__init__) or ""
        named = [p.name for p in parameters if p.name not in ("self", "cls") and p.kind not in (2, 4)]
        missing += [f"{name}({arg})" for arg in named if arg[0] != "_" and not re.search(rf"\b{arg}\b", docstring)]
    assert not missing
    assert len(list(public_callables())) > 130


def test_every_name_of_accel_says_what_it_does() -> None:
    """Their arguments are torch.cuda's, and ``device`` is explained in the docstring of the module."""
    for name in xamp.accel.__all__:
        assert inspect.getdoc(getattr(xamp.accel, name)), f"xamp.accel.{name} has no docstring"


def test_every_name_of_debug_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    (members,) = re.findall(r"^::: xamp\.debug\n    options:\n      members: \[(.+)\]$", text, re.MULTILINE)
    assert sorted(members.split(", ")) == sorted(xamp.debug.__all__)


def test_the_page_of_apex_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indented calls of docs/apex.md: the import, and the call with ``backend="apex"``."""
    text = (DOCS / "apex.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") and "delegate" not in line]
    assert "from xamp.apex import amp" in lines
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    model = torch.nn.Linear(2, 2)
    names = {"xamp": xamp, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for line in lines:
        if line != "from apex import amp":
            exec(line, names)
    assert xamp.session(model).policy.op_policy == "apex"
    xamp.session(model).close()
