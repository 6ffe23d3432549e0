"""Ports the text of a file that is no Python."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

from xamp.port.engine import Ported
from xamp.port.other.kinds import Kind, kind_of
from xamp.port.other.lines import ONLY, Line, Lines
from xamp.port.other.packages import port_packages
from xamp.port.other.values import SPOKEN, port_values
from xamp.port.other.variables import is_printed, port_variables
from xamp.port.rule import Grade, Target
from xamp.port.rules import load
from xamp.port.vendor_names import MENTIONS, NAMES, call_of, library_of
from xamp.port.vendor_only import COMMANDS, TEXTS

__all__ = ["port_lines", "port_other"]

_COMMAND = re.compile(rf"(?<![\w.-])(?:{'|'.join(sorted(COMMANDS, key=len, reverse=True))})(?![\w.-]|\s*[:=])")
_PATTERNS = tuple((re.compile(pattern, re.I if "/" in pattern else 0), text) for pattern, text in TEXTS)
_BARE = r"(?i)cuda|nccl|nvidia|cudnn|cublas|nvcc|nvtx|nvml|nvrtc|tensorrt|apex|npu|hccl|ascend|cann"
# By ASCII, as the bytes are searched: in a Chinese text no space stands beside a word.
_WORD = re.compile(rf"(?i)[\w./:@%+-]*?(?:{MENTIONS.pattern.decode()[4:]})[\w./:@%+-]*", re.ASCII)
_APEX = re.compile(r"(?<![\w.:-])/?\bapex/?(?=[\s\"';)]|$)")
_KEY = re.compile(r"[\"']?\s*[:=]")
_LINK = re.compile(r"\]\(https?:")
_SHELLS = (Kind.SHELL, Kind.DOCKER, Kind.MAKE)
_PEOPLE = "a text for people"
_COMMENT = "a comment"
_OWN = "a name of the project's own"
_PART = "a part of what line {0} tells of"
_UNKNOWN = "names a device, and no rule knows this form; see whether another device needs it"
_SOURCE = (
    "a source for CUDA's compiler, which runs on CUDA only; write it with torch's own operators, or build a form for "
    "each other device"
)
_NATIVE = "this source names a device; on another one it needs a form of its own, or torch's own operators in its place"
_PATCH = "a patch of what names a device: apply it, and port what comes out"
_CMAKE = "builds for CUDA, which runs on CUDA only"
_WHOLE = {
    Kind.CUDA: (Grade.UNSUPPORTED, _SOURCE),
    Kind.NATIVE: (Grade.NOTED, _NATIVE),
    Kind.PATCH: (Grade.NOTED, _PATCH),
}
_SORTS = re.compile(r"(?i)sort|order|descend")  # beside the verb


def port_other(path: str, data: bytes, own: Collection[str] = ()) -> tuple[bytes, Ported]:
    """Port a file that is no Python.

    Args:
        path: tells what it is.
        data: its bytes.
        own: names of modules of the project, which are no library's.

    Returns:
        Its bytes after porting, and what was found. Every line that names a device is among the findings, or the places
        that stay.
    """
    try:
        encoding = "utf-8"
        text = data.decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"  # gives every byte back; edits are ASCII
        text = data.decode(encoding)
    ported = port_lines(kind_of(path, data[:4096]), text, own)
    return (ported.text.encode(encoding) if ported.changed else data), ported


def port_lines(kind: Kind, text: str, own: Collection[str] = ()) -> Ported:
    """Port a text of a kind, such as a notebook's cell for a shell; see :func:`port_other`."""
    lines = Lines(kind, text, own)
    if kind in _WHOLE:
        _whole(lines, *_WHOLE[kind])
    else:
        _lines(lines)
    found = sorted(lines.findings, key=lambda each: (each.line, each.column))
    stays = tuple(each for each in found if each.grade is Grade.NEUTRAL)
    new = lines.result()
    return Ported(new, new != text, tuple(each for each in found if each.grade is not Grade.NEUTRAL), stays)


def _lines(lines: Lines) -> None:
    goes_on = False
    for line in lines:
        if not goes_on and not NAMES.search(line.text.encode("utf-8", "replace")):
            goes_on = port_packages(lines, line, False) if line.text.rstrip().endswith("\\") else False
            continue
        if lines.kind is Kind.TEXT or line.is_shown:
            _rest(lines, line, _PEOPLE)
            continue
        if lines.kind is Kind.CMAKE:
            _cmake(lines, line)
            continue
        port_variables(lines, line)
        goes_on = port_packages(lines, line, goes_on)
        _patterns(lines, line)
        _commands(lines, line)
        _apex(lines, line)
        port_values(lines, line, _table())
        _rest(lines, line, "")


def _whole(lines: Lines, grade: Grade, text: str) -> None:
    """A file that is told of once, for it is ported as a whole or not at all."""
    said = 0
    for line in lines:
        for found in _WORD.finditer(line.text):
            if found.start() >= line.end:
                lines.say(line, found.span(), Grade.NEUTRAL, _COMMENT)
            elif said:
                lines.say(line, found.span(), Grade.NEUTRAL, _PART.format(said))
            else:
                said = line.number
                lines.say(line, found.span(), grade, text)
            break
    first = next(iter(lines), None)
    if lines.kind is Kind.CUDA and not said and first is not None:
        lines.say(first, (0, len(first.text)), grade, text)


def _cmake(lines: Lines, line: Line) -> None:
    for found in _WORD.finditer(line.code):
        lines.say(line, found.span(), Grade.NOTED, _CMAKE)
        return
    _rest(lines, line, "")


def _patterns(lines: Lines, line: Line) -> None:
    for pattern, text in _PATTERNS:
        for found in pattern.finditer(line.code):
            if not line.is_done(*found.span()):
                lines.say(line, found.span(), Grade.NOTED, text, ONLY)


def _commands(lines: Lines, line: Line) -> None:
    """Programs of CUDA, where they are run; a word in a sentence is none."""
    if lines.kind in (Kind.PACKAGES, Kind.OTHER):
        return
    for found in _COMMAND.finditer(line.code):
        if not line.is_done(*found.span()):
            lines.say(line, found.span(), Grade.NOTED, f"{found[0]}: {COMMANDS[found[0]]}", ONLY)


def _apex(lines: Lines, line: Line) -> None:
    """``cd apex``, ``ADD apex /apex/``: Apex is fetched and built."""
    if lines.kind in _SHELLS:
        for found in _APEX.finditer(line.code):
            if not line.is_done(*found.span()):
                lines.say(line, found.span(), Grade.NOTED, "xamp takes Apex's place; leave it out", ONLY)


def _rest(lines: Lines, line: Line, reason: str) -> None:
    """What is left of a line that names a device: it is told of with the reason why it stays."""
    for found in _WORD.finditer(line.text):
        if line.is_done(*found.span()) or any(low < found.end() and found.start() < high for low, high in line.done):
            continue
        if found.start() >= line.end:
            lines.say(line, found.span(), Grade.NEUTRAL, _COMMENT)
        elif reason or _is_spoken(lines, line, found):
            lines.say(line, found.span(), Grade.NEUTRAL, reason or _PEOPLE)
        elif found[0].partition(".")[0] not in lines.own and (known := library_of(found[0])) is not None:
            lines.say(line, found.span(), Grade.NOTED, f"{known[0]}: {known[1].instead}", ONLY)
        elif (named := call_of(found[0])) is not None:
            lines.say(line, found.span(), Grade.NOTED, f"{found[0]}: {named.text}", ONLY)
        elif _is_name(found[0]) or _is_key(line, found):
            lines.say(line, found.span(), Grade.NEUTRAL, _OWN)
        else:
            lines.say(line, found.span(), Grade.NOTED, _UNKNOWN)


def _is_spoken(lines: Lines, line: Line, found: re.Match[str]) -> bool:
    """Whether people read a word: a shell prints it, the key says so, or it is a link's."""
    if lines.kind in _SHELLS and is_printed(line.code, found.start()):
        return True
    return SPOKEN.match(line.code) is not None or _LINK.match(line.text, found.end()) is not None


def _is_name(word: str) -> bool:
    """Whether a word is longer than what it was found by: ``use_cuda``, ``--no-cuda``, ``src/roi_cuda.cpp``."""
    bare = word.strip("-+:.@%/")
    return re.fullmatch(_BARE, bare) is None or (word.startswith("--"))


def _is_key(line: Line, found: re.Match[str]) -> bool:
    """Whether a word is a key, or says how something is sorted."""
    if found[0] == "ascend" and _SORTS.search(line.code):
        return True
    return _KEY.match(line.text, found.end() - found[0].endswith(":")) is not None


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, Target]:
    table: dict[str, Target] = {}
    for rule in load():
        for path, target in rule.names.items():
            table.setdefault(path, target)
    return table
