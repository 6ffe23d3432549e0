"""Environment variables in files that are no Python: the NPU's is written beside CUDA's where that is certain."""

from __future__ import annotations

import re

from xamp.port.other.kinds import Kind
from xamp.port.other.lines import Line, Lines, is_quoted
from xamp.port.rule import Grade
from xamp.port.vendor_names import variables_in

__all__ = ["is_printed", "port_variables"]

_IN_SHELL = (Kind.SHELL, Kind.DOCKER, Kind.MAKE, Kind.YAML)
_HIDES_ALL = "hides all of CUDA's devices, and no NPU; XAMP_DEVICE=cpu chooses the CPU on every machine"
_NO_LIST = "may be no list of indices"
_READS = "reads what one vendor's devices are told; {0} says it for the other's"
_NO_EFFECT = "is read by the software of one vendor's devices only, and has no effect on another device"
_IS_READ = "reads a variable of one vendor's software, which is empty where nothing sets it"
_BESIDE = "{0} stands beside it"
_VALUE = r"\"[^\"]*\"|'[^']*'|(?:\$\{[^}]*\}|\$\([\w.]+\)|[^\s;&|)(`\"'])*"
# What may stand before an assignment that a shell takes as one; what goes before it in a Dockerfile, a Makefile, YAML.
_BEFORE = re.compile(
    r"(?:^|[;&|({`!]|\$\(|\b(?:then|do|else|time|exec|RUN|CMD|ENV)(?=\s)|^[ \t]*(?:-[ ]+)?(?:[\w.-]+:[ ]+)?)[ \t@+-]*"
    r"(?:(?:export|declare|typeset|local|readonly|env|/usr/bin/env|sudo|nohup|setsid|nice|RUN)[ \t]+(?:-\w+[ \t]+)*)*"
    rf"(?:\w+=(?:{_VALUE})[ \t]+)*\Z"
)
_ASSIGNED = re.compile(rf"[\"']?(?:=|[ ]*:[ ]+)(?!\S*\$)(?P<value>{_VALUE})")
_SET = re.compile(r"(?:setenv|set[ \t]+-\w+)[ \t]+\Z")  # csh, fish
_PRINTS = re.compile(r"\b(?:echo|printf|print|log|info|warn|die)\b")


def is_printed(code: str, at: int) -> bool:
    """Whether a column stands in a text that a shell prints."""
    return _PRINTS.search(code[:at]) is not None and is_quoted(code, at)


def port_variables(lines: Lines, line: Line) -> None:
    """Look at the variables of a line."""
    for at, name, known in variables_in(line.code):
        span = (at, at + len(name))
        if line.is_done(*span):
            continue
        is_read = line.code[:at].endswith(("$", "${", "${!", "%", "$env:"))
        if not known.text:
            lines.say(line, span, Grade.NEUTRAL, _IS_READ if is_read else _NO_EFFECT)
            if found := _ASSIGNED.match(line.code, span[1]):
                line.done.append(found.span("value"))
        elif not known.beside:
            lines.say(line, span, Grade.NOTED, known.text)
        elif lines.has_beside(line, at, known.beside):
            lines.say(line, span, Grade.NEUTRAL, _BESIDE.format(known.beside))
        elif is_printed(line.code, at):
            lines.say(line, span, Grade.NEUTRAL, "a text that people read")
        elif known.is_certain and (note := _write_beside(lines, line, at, name, known.beside)) is not None:
            text = note if _HIDES_ALL in note else note and f"{note}; {known.text}"
            lines.say(line, span, Grade.NOTED if note else Grade.CERTAIN, text)
        else:
            lines.say(line, span, Grade.NOTED, _READS.format(known.beside) if is_read else known.text)


def _write_beside(lines: Lines, line: Line, at: int, name: str, npu: str) -> str | None:
    """Write the NPU's variable where the form is known.

    Returns:
        Empty: it is written. A text: why it is not, though the form is known. None: the form is not known.
    """
    before, after = line.code[:at], line.code[at + len(name) :]
    value = _value_of_line(lines.kind, before, after)
    if value is not None and not line.text.rstrip().endswith("\\"):
        note = _misfit(lines.kind, name, value)
        if not note:
            lines.add_below(line, line.text.replace(name, npu))
        return note
    if lines.kind not in _IN_SHELL or is_quoted(line.code, at):
        return None
    if lines.kind is Kind.MAKE and not line.text.startswith("\t"):
        return None  # what follows belongs to the value
    words = _SET.search(before)
    if words and (found := re.match(rf"[ \t]+({_VALUE})(?=[ \t]*(?:$|[;&|]))", after)):  # of fish's lists none
        new = f"; {words[0]}{npu} {found[1].replace(name, npu)}"
    elif re.search(r"\b(?:export|unset)[ \t]+(?:\w+[ \t]+)*\Z", before) and re.match(r"[ \t]*(?:$|[;&|])", after):
        lines.insert(line, at + len(name), f" {npu}")
        return ""
    elif (found := re.match(rf"=({_VALUE})", after)) and _BEFORE.search(before):
        new = f" {npu}={found[1].replace(name, npu)}"
        line.done.append((at + len(name), at + len(name) + found.end()))  # ${X:-0} of its own
    else:
        return None
    rest = after[found.end() :]
    is_asked = rest[:1] in ("`", "(")  # a command's output
    note = f"the output of a command {_NO_LIST}" if is_asked else _misfit(lines.kind, name, found[1])
    if not note:
        lines.insert(line, at + len(name) + found.end(), new)
    return note


def _value_of_line(kind: Kind, before: str, after: str) -> str | None:
    """The value in a line that does nothing else than set the variable, so that a copy of it can set another one."""
    found = None
    if kind in (Kind.MAKE, Kind.VARIABLES) and re.fullmatch(r"(?:export[ \t]+)?", before):
        found = re.match(r"[ \t]*[:?+]?=[ \t]*(.*)", after)
    elif kind is Kind.DOCKER and re.fullmatch(r"\s*ENV[ \t]+", before):
        found = re.match(r"[ \t]+(.*)", after)
    elif kind is Kind.YAML and re.fullmatch(r"[ ]*[\"']?", before):
        found = re.match(r"[\"']?[ ]*:[ ]+(.*)", after)
    elif kind is Kind.YAML and re.fullmatch(r"[ ]*-[ ]+[\"']?", before):
        found = re.match(rf"=({_VALUE})[\"']?[ ]*$", after)
    return found[1].strip() if found else None


def _misfit(kind: Kind, name: str, value: str) -> str:
    """Why a value is none for the NPU's variable; empty where it is one."""
    plain = value.strip("\"'").strip()
    if plain in ("", "-1", "none", "NoDevFiles"):
        return f"{name}={plain} {_HIDES_ALL}"
    if re.fullmatch(r"\d+(?:\s*,\s*\d+)*", plain):
        numbers = [int(each) for each in re.findall(r"\d+", plain)]
        return "" if sorted(set(numbers)) == numbers else f"{plain} does not ascend"
    of_make = r"|\$\(\w+\)|\$\$\w+" if kind is Kind.MAKE else ""  # in a shell that would run a command twice
    known = re.fullmatch(rf"(?:\$\w+|\$\{{[^}}`(]*\}}{of_make}|\$[@*#]|[\d,])+", plain)
    return "" if known else f"{plain} {_NO_LIST}"
