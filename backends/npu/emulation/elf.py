"""Reads what a shared library defines and what it asks of others, without loading it: 64-bit ELF, little-endian."""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

__all__ = ["Library", "Symbol", "read", "read_all"]

_HEADER = struct.Struct("<4sBB10x24xQ10xHHH")  # magic, class, byte order; where the sections are; their size, number
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<QQ")
_NEED, _VERSION = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_DYNSYM, _DYNAMIC_SECTION, _VERSIONS_NEEDED, _VERSION_OF_SYMBOL = 11, 6, 0x6FFFFFFE, 0x6FFFFFFF
_NEEDED, _SONAME, _RPATH, _RUNPATH = 1, 14, 15, 29
_GLOBAL, _WEAK = 1, 2


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A symbol that a library defines.

    Attributes:
        kind: of the ELF kinds ``FUNCTION``, ``DATA`` and ``THREAD`` are told apart; others are indirect functions.
        strong: whether no other definition may stand in its place; C++ makes templates and inline functions weak.
        size: in bytes.
    """

    DATA = 1
    FUNCTION = 2
    THREAD = 6

    kind: int
    strong: bool
    size: int


@dataclasses.dataclass(frozen=True)
class Library:
    """The dynamic tables of one library.

    Attributes:
        path: the file.
        needed: the names of the libraries that it loads.
        folders: where it says that they are; ``$ORIGIN`` is replaced.
        defined: what others may use, by name.
        wanted: what it must find elsewhere, by name: the library that has it, where its version tells, else "".
    """

    path: Path
    needed: tuple[str, ...]
    folders: tuple[str, ...]
    defined: dict[str, Symbol]
    wanted: dict[str, str]


class _File:
    """A mapped file and its sections by type; only the sections that this module reads occur once."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        magic, bits, order, start, size, count, _ = _HEADER.unpack_from(data)
        if (magic, bits, order) != (b"\x7fELF", 2, 1):
            raise ValueError("not a 64-bit little-endian ELF file")
        self.sections = [_SECTION.unpack_from(data, start + size * index) for index in range(count)]
        self.by_type = {section[1]: section for section in self.sections}

    def content(self, kind: int) -> bytes:
        """The content of the section of that type; empty where there is none."""
        section = self.by_type.get(kind)
        return b"" if section is None else self.data[section[4] : section[4] + section[5]]

    def strings(self, kind: int) -> bytes:
        """The table of strings that belongs to the section of that type."""
        section = self.by_type.get(kind)
        if section is None:
            return b"\0"
        linked = self.sections[section[6]]
        return self.data[linked[4] : linked[4] + linked[5]]


def read(path: Path) -> Library:
    """The tables of the library ``path``.

    Raises:
        ValueError: it is no shared library of a 64-bit little-endian machine.
        OSError: it cannot be read.
    """
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            file = _File(data)
            needed, folders = _dynamic(file, path)
            defined, wanted = _symbols(file)
        except (struct.error, IndexError, ValueError) as error:
            raise ValueError(f"{path} is not a shared library that can be read: {error}") from error
    return Library(path, needed, folders, defined, wanted)


def read_all(roots: Iterable[str], folders: Sequence[Path], without: Collection[str] = ()) -> list[Library]:
    """The tables of libraries and of what is loaded with them.

    Args:
        roots: their names.
        folders: where libraries are looked for; what is in none of them is left out.
        without: names to leave out, with what only these load.

    Raises:
        ValueError, OSError: see :func:`read`.
    """
    found: dict[str, Library] = {}
    names = list(roots)
    while names:
        name = names.pop()
        there = [folder / name for folder in folders if (folder / name).is_file()]
        if there and name not in found and name not in without:
            found[name] = read(there[0])
            names += found[name].needed
    return list(found.values())


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _dynamic(file: _File, path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    strings = file.strings(_DYNAMIC_SECTION)
    entries = list(_DYNAMIC.iter_unpack(file.content(_DYNAMIC_SECTION)))
    needed = tuple(_text(strings, value) for tag, value in entries if tag == _NEEDED)
    paths = ":".join(_text(strings, value) for tag, value in entries if tag in (_RPATH, _RUNPATH))
    return needed, tuple(each.replace("$ORIGIN", str(path.parent)) for each in paths.split(":") if each)


def _symbols(file: _File) -> tuple[dict[str, Symbol], dict[str, str]]:
    strings, versions, providers = file.strings(_DYNSYM), file.content(_VERSION_OF_SYMBOL), _providers(file)
    defined: dict[str, Symbol] = {}
    wanted: dict[str, str] = {}
    for index, (name, info, _, section, _, size) in enumerate(_SYMBOL.iter_unpack(file.content(_DYNSYM))):
        binding = info >> 4
        if not name or not binding:  # local ones
            continue
        if section:
            defined[_text(strings, name)] = Symbol(info & 15, binding == _GLOBAL, size)
        elif binding != _WEAK:  # a weak one may stay undefined
            version = struct.unpack_from("<H", versions, 2 * index)[0] & 0x7FFF if versions else 0
            wanted[_text(strings, name)] = providers.get(version, "")
    return defined, wanted


def _providers(file: _File) -> dict[int, str]:
    """The library that a version of a symbol is of, by the version's number."""
    data, strings = file.content(_VERSIONS_NEEDED), file.strings(_VERSIONS_NEEDED)
    found: dict[int, str] = {}
    at = 0
    while data:
        _, count, library, first, following = _NEED.unpack_from(data, at)
        each = at + first
        for _ in range(count):
            _, _, number, _, after = _VERSION.unpack_from(data, each)
            found[number & 0x7FFF] = _text(strings, library)
            each += after
        if not following:
            break
        at += following
    return found
