"""Packages that work on CUDA only, where a file lists what to install or a line installs it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xamp.port.other.kinds import Kind
from xamp.port.other.lines import ONLY, Line, Lines
from xamp.port.rule import Grade
from xamp.port.vendor_names import package_of

__all__ = ["port_packages"]

_INSTALLS = re.compile(
    r"\b(?:pip[\d.]*|uv|conda|mamba|micromamba|poetry|pdm|pipenv|pipx|apt|apt-get|yum|dnf|easy_install|pixi|brew)\b"
    r".*\b(?:install|add|create|sync|update|upgrade)\b|\bpython[\d.]*\s+-m\s+pip\b"
)
_NAME = r"[A-Za-z][A-Za-z0-9._-]*"
_IN_LIST = re.compile(rf"^[\s\"'\[{{,]*(?:-\s+)?[\"']?(?:[\w.-]+::)?(?P<name>{_NAME})")
_WORD = re.compile(rf"(?<![\w./:=@-])[\"']?(?P<name>{_NAME})(?=[\"'\[\s<>=!~;,@&|)]|$)")
_TEXT = re.compile(rf"[\"'](?P<name>{_NAME})(?:\[[^\]]*\])?\s*(?:[<>=!~;@].*?)?[\"']")
_KEY = re.compile(rf"^(?P<name>{_NAME})\s*=\s*[\"'{{]")
_URL = re.compile(r"#egg=(?P<name>[\w.-]+)|github\.com[:/][\w.-]+/(?P<repo>[\w.-]+?)(?:\.git)?(?=[@#/\s\"']|$)")
_WHEEL = re.compile(r"(?:^|[/\s\"'])(?P<name>[A-Za-z]\w*)-\d[^/\s\"']*\.whl\b")
_WORDS_TOO = ("cuda", "nccl", "cudnn", "apex")
_WITH_ITEMS = (Kind.YAML, Kind.TOML, Kind.INI)


def port_packages(lines: Lines, line: Line, goes_on: bool) -> bool:
    """Look at the packages of a line; return whether the next line goes on with an installation."""
    code = line.code
    if lines.kind is Kind.TOML and re.match(r"\s*name\s*=", code):
        return False  # the project's own
    installs = goes_on or _INSTALLS.search(code) is not None
    for found, name in _names(lines.kind, code, installs):
        library = package_of(name)
        if lines.kind is not Kind.PACKAGES and not installs and name in _WORDS_TOO:
            continue  # a keyword, or the name of a job
        if library is not None and not line.is_done(*found):
            text = f"{name}: {library.instead}" if library.modules else library.instead  # so that many are one note
            lines.say(line, found, Grade.UNSUPPORTED, text, ONLY)
    return installs and code.rstrip().endswith(("\\", "`", "^"))


def _names(kind: Kind, code: str, installs: bool) -> Iterator[tuple[tuple[int, int], str]]:
    patterns = [_URL, _WHEEL] if installs or kind is Kind.PACKAGES else []
    if installs:
        patterns.append(_WORD)
    if kind is Kind.PACKAGES:
        patterns += [_IN_LIST, _TEXT]
    elif kind is Kind.TOML:
        patterns += [_TEXT, _KEY]
    elif kind in _WITH_ITEMS and (kind is not Kind.YAML or re.match(r"\s*-\s", code)):
        patterns.append(_IN_LIST)
    for pattern in patterns:
        for found in pattern.finditer(code):
            group = next(name for name, value in found.groupdict().items() if value is not None)
            yield found.span(group), found[group]
