"""Devices, backends and dotted names as values in configurations and on command lines."""

from __future__ import annotations

import re

from xamp.port.other.kinds import Kind
from xamp.port.other.lines import Line, Lines
from xamp.port.rule import Grade, Target

__all__ = ["CONFIGURED", "SPOKEN", "port_values"]

CONFIGURED = (Kind.YAML, Kind.JSON, Kind.TOML, Kind.INI, Kind.VARIABLES)
_EDGE = r"(?:(?<![\w./:$-])|(?<=:[-=]))"  # ${X:-cuda} has one too
_DEVICE = re.compile(rf"{_EDGE}(?P<word>cuda|npu)(?P<index>:\d+)?(?![\w./-]|\s*[=(]|:\S)(?!['\"]?\s*:(?:\s|$))")
_BACKEND = re.compile(rf"{_EDGE}(?:nccl|hccl)(?![\w./-])(?!['\"]?\s*[:=](?:\s|$))")
_BOTH = re.compile(r"\b(?:cpu:gloo,)?(?:cuda:nccl|npu:hccl)\b")
_DOTTED = re.compile(rf"{_EDGE}(?:apex|torch\.(?:cuda|npu)|torch_npu)(?:\.\w+)+")
SPOKEN = re.compile(
    r"[\s\"'-]*(?:(?:keywords|description|title|classifiers|topics|tags|labels)[\"']?\s*[:=]|"
    r"name[\"']?\s*:\s+[\"']?\w+\s+\w)"  # a name of several words
)
_SEARCHES = re.compile(r"\b[efz]?grep\b[^|;&]*\Z")
_IN_FILE = "names a device: on {0} write {1}, or leave it out where the script's own default is xamp.device_type()"
_IN_COMMAND = "names a device: on {0} write {1}, or leave the option out where its default is xamp.device_type()"
_BACKENDS = "names a backend of torch.distributed: on {0} write {1}; xamp.distributed_backend() tells it"
_SEARCHED = "searches for what names a device: {1} may stand there on {0}"
_OTHER = {"cuda": ("an NPU", "npu"), "npu": ("CUDA", "cuda"), "nccl": ("an NPU", "hccl"), "hccl": ("CUDA", "nccl")}


def port_values(lines: Lines, line: Line, table: dict[str, Target]) -> None:
    """Look at the values of a line; dotted names of Apex and torch.cuda that ``table`` has are rewritten."""
    if SPOKEN.match(line.code):
        return
    text = _IN_FILE if lines.kind in CONFIGURED else _IN_COMMAND
    for found in (*_BOTH.finditer(line.code), *_BACKEND.finditer(line.code)):
        _say(lines, line, found.span(), _BACKENDS, *_OTHER[found[0][-4:]])
    for found in _DEVICE.finditer(line.code):
        where, name = _OTHER[found["word"]]
        _say(lines, line, found.span(), text, where, f"{name}{found['index'] or ''}")
    for found in _DOTTED.finditer(line.code):
        _dotted(lines, line, found, table)


def _say(lines: Lines, line: Line, span: tuple[int, int], text: str, where: str, name: str) -> None:
    if not line.is_done(*span):
        is_searched = _SEARCHES.search(line.code[: span[0]]) is not None
        lines.say(line, span, Grade.NOTED, (_SEARCHED if is_searched else text).format(where, name))


def _dotted(lines: Lines, line: Line, found: re.Match[str], table: dict[str, Target]) -> None:
    """``_target_: apex.optimizers.FusedAdam``: a whole value of a configuration is looked up by its name."""
    if line.is_done(*found.span()):
        return
    target = table.get(found[0])
    rest = line.code[found.end() :].strip()
    is_whole = re.fullmatch(r"[\"']?\s*[,}\]]*", rest) is not None
    if target is None or target.new is None:
        known = target.text if target is not None and target.text else "xamp has no counterpart of this name"
        lines.say(line, found.span(), Grade.NOTED, known)
    elif lines.kind in CONFIGURED and is_whole and target.grade is Grade.CERTAIN:
        lines.replace(line, found.span(), target.new)
        lines.say(line, found.span(), Grade.CERTAIN, "")
    else:
        lines.say(line, found.span(), Grade.NOTED, f"{found[0]} is {target.new} in a port")
