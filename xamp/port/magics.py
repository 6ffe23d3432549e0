"""Lines of a notebook's cell that are for IPython: hidden from the parser, and shown again as they were."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

__all__ = ["MARK", "Language", "file_written", "hide", "language", "run_lines", "show"]

MARK = "#xamp-magic "
_LINE = re.compile(
    r"[ \t]*(?:[%!?].*"  # %matplotlib inline, !pip install x, ?x
    r"|[\w.*%]+\?{1,2}[ \t]*"  # x?, x??
    r"|[\w.,*\[\]'\" \t()]+=[ \t]*(?:![^=]|%[A-Za-z]).*)"  # x = !ls, x = %time f()
)
_TOKEN = re.compile(r"""(?i)[rbfu]{0,3}('{3}|"{3}|'|")|\#|[(\[{]|[)\]}]""")


_ABOVE = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n)*")  # blank lines and comments, such as Colab's #@title
_CELL = re.compile(rf"{_ABOVE.pattern}%%(\w+)(.*)")
_PYTHON = ("time", "timeit", "capture", "prun", "memit", "mprun", "debug", "scalene", "snakeviz")
_CUDA = ("cu", "cuda", "cuda_group_save", "nvcc")
_SHELL = ("bash", "sh", "shell", "zsh", "system", "sx", "cmd")


class Language(enum.Enum):
    """What a cell is written in."""

    PYTHON = "Python, as the rest of the notebook"
    SHELL = "a shell"
    FILE = "what a file holds that the cell writes, or Python that does not run with the rest"
    CUDA = "a source for CUDA's compiler"
    OTHER = "another language"


def language(code: str) -> Language:
    """What a cell is written in, as its magic says."""
    found = _CELL.match(code)
    if found is None or found[1] in _PYTHON:
        return Language.PYTHON
    words = found[2].split()
    if found[1] in _SHELL or (found[1] == "script" and words[:1] and words[0].rpartition("/")[2] in _SHELL):
        return Language.SHELL
    if found[1] in ("writefile", "file"):
        return Language.FILE
    if found[1] in _CUDA:
        return Language.CUDA
    is_python = found[1] in ("python", "python3") or (found[1] == "script" and "python" in found[2])
    return Language.FILE if is_python else Language.OTHER


def file_written(code: str) -> str:
    """The name of the file that a cell of :attr:`Language.FILE` is: the one that it writes, or a script's."""
    found = _CELL.match(code)
    words = found[2].split() if found is not None and found[1] in ("writefile", "file") else ["x.py"]
    return words[-1].strip("\"'") if words else ""


_RUN = re.compile(
    r"(?m)^([ \t]*(?:[\w.,*\[\]'\" \t()]+=[ \t]*)?!+[ \t]*|[ \t]*%(?:env|set_env|sx|system)[ \t]+"
    r"|[ \t]*%(?=(?:pip|conda|mamba|run)\b))(.*)$"
)


def run_lines(code: str, port: Callable[[str, bool], str]) -> str:
    """The cell with what ``port`` makes of each line that runs in a shell: ``!nvidia-smi``, ``x = !ls``.

    Args:
        code: the cell.
        port: takes the command, and whether it is none but ``A=1`` of ``%env A=1``, which sets one variable.
    """
    out: list[str] = []
    waiting: list[str] = []  # of one command, which a backslash takes to the next line
    for line, hidden in zip(code.split("\n"), hide(code).split("\n"), strict=True):
        waiting.append(line)
        if MARK in hidden and line.rstrip("\r").endswith("\\"):
            continue
        whole = "\n".join(waiting)
        found = _RUN.match(whole) if MARK in hidden else None
        start = found.start(2) if found is not None else 0
        out.append(whole if found is None else f"{found[1]}{port(whole[start:], 'env' in found[1])}")
        waiting = []
    return "\n".join([*out, *waiting])


def hide(code: str) -> str:
    """Each such line as the statement ``pass`` with a comment, so that a block that has nothing else stays one."""
    out: list[str] = []
    state = _State()
    goes_on = False  # a line for IPython that ends with a backslash takes the next one along
    above = _ABOVE.match(code)
    first = code.count("\n", 0, above.end()) if above else 0
    for number, line in enumerate(code.split("\n")):
        starts = state.starts_statement
        is_cell = number == first and line.startswith("%%")
        if goes_on or is_cell or (starts and _LINE.fullmatch(line.rstrip("\r"))):
            space = "" if goes_on else line[: len(line) - len(line.lstrip(" \t"))]
            out.append(f"{space}pass{MARK}{line[len(space) :]}" if not goes_on else f"{MARK}{line}")
            goes_on = line.rstrip("\r").endswith("\\")
            continue
        goes_on = False
        out.append(line)
        state.read(line)
    return "\n".join(out)


def show(code: str) -> str:
    """The lines as they were."""
    return re.sub(rf"(?m)^([ \t]*)(?:pass)?{MARK}", r"\1", code)


class _State:
    """What is open at the end of a line: brackets, a text in three quotes, a backslash."""

    def __init__(self) -> None:
        self.depth = 0
        self.quote = ""
        self.continued = False

    @property
    def starts_statement(self) -> bool:
        """Whether the next line begins a statement."""
        return self.depth == 0 and not self.quote and not self.continued

    def read(self, line: str) -> None:
        """Go past a line."""
        at = 0
        self.continued = line.rstrip("\r").endswith("\\")
        while at < len(line):
            if self.quote:
                at = self._text(line, at)
                continue
            found = _TOKEN.search(line, at)
            if found is None:
                return
            token, at = found[0], found.end()
            if token == "#":
                self.continued = False
                return
            if token in "([{":
                self.depth += 1
            elif token in ")]}":
                self.depth = max(0, self.depth - 1)
            else:
                self.quote = found[1]
        if len(self.quote) == 1 and not self.continued:
            self.quote = ""  # a text in one quote ends with its line

    def _text(self, line: str, at: int) -> int:
        while at < len(line):
            if line[at] == "\\":
                at += 2
            elif line.startswith(self.quote, at):
                at += len(self.quote)
                self.quote = ""
                return at
            else:
                at += 1
        return at
