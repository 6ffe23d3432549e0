"""What a file is, by its name and its first line."""

from __future__ import annotations

import enum
import os
import re

from xamp.port.vendor_names import NAMES

__all__ = ["Kind", "is_python", "is_wanted", "kind_of", "read_start"]

_LARGEST = 16 * 2**20  # bytes; a larger text is data
_START = 4096


class Kind(enum.Enum):
    """What is known of a file, and so how it is read."""

    PYTHON = "Python"
    NOTEBOOK = "a notebook"
    SHELL = "a shell script"
    BATCH = "a script for Windows"
    DOCKER = "a Dockerfile"
    MAKE = "a Makefile"
    VARIABLES = "a file of environment variables"
    YAML = "YAML"
    JSON = "JSON"
    TOML = "TOML"
    INI = "an INI file"
    PACKAGES = "a list of packages"
    NATIVE = "a source for a compiler"
    CUDA = "a source for CUDA's compiler"
    CMAKE = "a CMake file"
    PATCH = "a patch"
    TEXT = "a text for people"
    OTHER = "a text of a kind that xamp port does not know"


_ENDINGS = {
    Kind.PYTHON: (".py", ".pyw"),
    Kind.NOTEBOOK: (".ipynb",),
    Kind.SHELL: (
        *(".sh", ".bash", ".zsh", ".ksh", ".csh", ".tcsh", ".fish", ".slurm", ".sbatch", ".pbs", ".lsf", ".sge"),
        *(".envrc", ".job", ".qsub", ".command"),
    ),
    Kind.BATCH: (".bat", ".cmd", ".ps1"),
    Kind.DOCKER: (".dockerfile", ".containerfile", ".def"),
    Kind.MAKE: (".mk", ".mak", ".justfile"),
    Kind.VARIABLES: (".env",),
    Kind.YAML: (".yaml", ".yml"),
    Kind.JSON: (".json", ".json5", ".jsonc", ".jsonnet", ".libsonnet"),
    Kind.TOML: (".toml",),
    Kind.INI: (".cfg", ".ini", ".conf", ".properties", ".gin", ".config", ".prototxt"),
    Kind.NATIVE: (".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".pyx", ".pxd", ".pxi", ".inl", ".hip"),
    Kind.CUDA: (".cu", ".cuh", ".ptx"),
    Kind.CMAKE: (".cmake",),
    Kind.PATCH: (".patch", ".diff"),
    Kind.TEXT: (
        *(".md", ".rst", ".txt", ".html", ".htm", ".tex", ".adoc", ".markdown", ".bib", ".svg", ".xml", ".css"),
        *(".csv", ".tsv", ".log"),
    ),
}
_OF_ENDING = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
_OF_NAME = (
    (re.compile(r"(?i)(docker|container|singularity)file([.-].*)?|singularity([.-].*)?"), Kind.DOCKER),
    (re.compile(r"(gnu)?makefile([.-].*)?|justfile", re.I), Kind.MAKE),
    (re.compile(r"\.env([.-].*)?"), Kind.VARIABLES),
    (re.compile(r"\.(bashrc|bash_profile|zshrc|profile|envrc|cshrc)"), Kind.SHELL),
    (re.compile(r"(.*[-_.])?(requirements?|constraints?|reqs?)([-_.].*)?\.(txt|in|pip|lock)", re.I), Kind.PACKAGES),
    (re.compile(r"pipfile(\.lock)?|(poetry|uv|pdm|pixi|conda)\.lock|conda-lock\.ya?ml", re.I), Kind.PACKAGES),
    (re.compile(r"(.*[-_])?(environment|conda|meta)([-_].*)?\.ya?ml", re.I), Kind.PACKAGES),
    (re.compile(r"cmakelists\.txt", re.I), Kind.CMAKE),
    (re.compile(r"(license|licence|copying|notice|authors|readme|changelog|contributing)([.-].*)?", re.I), Kind.TEXT),
)
_FOLDERS_OF_PACKAGES = re.compile(r"(?i)requirements?|reqs?")
_SHELLS = re.compile(rb"#!.*\b(ba|da|z|k|c|tc|fi)?sh\b")
_PYTHON = re.compile(rb"#!.*\bpython[\d.]*\b")


def kind_of(path: str, start: bytes = b"") -> Kind:
    """What a file is.

    Args:
        path: its path.
        start: its first bytes, which tell where the name does not.
    """
    name = os.path.basename(path)
    for pattern, kind in _OF_NAME:
        if pattern.fullmatch(name):
            return kind
    stem, ending = os.path.splitext(name)
    if ending in (".template", ".tmpl", ".j2", ".jinja", ".jinja2", ".in", ".example", ".sample", ".dist"):
        ending = os.path.splitext(stem)[1] or ending
    folder = os.path.basename(os.path.dirname(path))
    if ending.lower() in (".txt", ".in") and _FOLDERS_OF_PACKAGES.fullmatch(folder):
        return Kind.PACKAGES
    known = _OF_ENDING.get(ending.lower())
    if known is not None:
        return known
    if _PYTHON.match(start):
        return Kind.PYTHON
    return Kind.SHELL if _SHELLS.match(start) else Kind.OTHER


def is_python(path: str, start: bytes) -> bool:
    """Whether a file that a call names is read as Python: by its ending, or because nothing says what it is."""
    return kind_of(path, start) in (Kind.PYTHON, Kind.OTHER)


def is_wanted(path: str) -> bool:
    """Whether a file of a folder is read: Python and notebooks, and other texts that name a device."""
    kind = kind_of(path)
    if kind in (Kind.PYTHON, Kind.NOTEBOOK, Kind.CUDA):
        return True
    try:
        if not 0 < os.path.getsize(path) <= _LARGEST:
            return False
        with open(path, "rb") as file:
            start = file.read(_START)
            if b"\0" in start:
                return False
            return kind_of(path, start) is Kind.PYTHON or NAMES.search(start + file.read()) is not None
    except OSError:
        return False


def read_start(path: str) -> bytes:
    """The first bytes of a file; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_START)
    except OSError:
        return b""
