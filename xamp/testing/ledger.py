"""The ledger: a file that lists the clauses that a backend is known to fail, each with a reason and a link.

A JSON list of objects::

    {"clause": "operators.result_dtype[rms_norm-*]", "reason": "...", "link": "https://...", "device": "*910A*"}

``clause`` may contain ``*``. ``device`` is optional: a glob that the device's name must match for the entry to count.
The ledger is strict both ways. These are failures: a clause that fails and is not in the ledger, a clause that is in
the ledger and passes, and an entry that names no clause.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path

from xamp.errors import PolicyError

__all__ = ["Entry", "Ledger", "read_ledger"]

_KEYS = ("clause", "reason", "link")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One known gap.

    Attributes:
        clause: Name of a clause, or a pattern in which ``*`` stands for anything.
        reason: Why these clauses fail, in a sentence.
        link: Where that is documented.
        device: A glob that the device's name must match.
    """

    clause: str
    reason: str
    link: str
    device: str = "*"

    def names(self, clause: str) -> bool:
        """Whether the entry is about ``clause``."""
        pattern = ".*".join(re.escape(part) for part in self.clause.split("*"))  # brackets stand for themselves
        return re.fullmatch(pattern, clause) is not None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The entries that count on one device."""

    entries: tuple[Entry, ...] = ()

    def of(self, clause: str) -> Entry | None:
        """The first entry about ``clause``."""
        return next((entry for entry in self.entries if entry.names(clause)), None)

    def on(self, device_name: str) -> Ledger:
        """A ledger of the entries that count on a device of this name."""
        return Ledger(tuple(entry for entry in self.entries if fnmatch.fnmatchcase(device_name, entry.device)))

    def unknown(self, clauses: Iterable[str]) -> list[Entry]:
        """The entries that name none of ``clauses``."""
        every = list(clauses)
        return [entry for entry in self.entries if not any(map(entry.names, every))]


def read_ledger(place: str) -> Ledger:
    """Read a ledger.

    Args:
        place: A file's path, or ``"package:file"`` for a file beside a package or module. Empty: no entries.

    Raises:
        PolicyError: The file cannot be read, or is not a ledger; the message says where and what.
    """
    if not place:
        return Ledger()
    try:
        found = json.loads(_text(place))
    except (OSError, ImportError, ValueError) as error:
        raise PolicyError(f"ledger {place!r}: cannot be read as JSON: {error}") from error
    if not isinstance(found, list):
        raise PolicyError(f"ledger {place!r}: must be a list of entries, not {type(found).__name__}")
    return Ledger(tuple(_entry(place, index, item) for index, item in enumerate(found)))


def _text(place: str) -> str:
    package, colon, name = place.partition(":")
    if colon and all(part.isidentifier() for part in package.split(".")):
        return _beside(package, name).read_text(encoding="utf-8")
    return Path(place).read_text(encoding="utf-8")


def _beside(package: str, name: str) -> Path:
    """The path of a file in the folder of a package, or beside a module that is a single file."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no package {package!r}")
    return Path(spec.origin).parent / name


def _entry(place: str, index: int, item: object) -> Entry:
    where = f"ledger {place!r}, entry {index}"
    if not isinstance(item, dict) or not all(isinstance(value, str) and value.strip() for value in item.values()):
        raise PolicyError(f"{where}: must be an object of strings that are not empty, not {item!r}")
    missing, unknown = [key for key in _KEYS if key not in item], sorted(set(item) - {*_KEYS, "device"})
    if missing or unknown:
        raise PolicyError(f"{where}: lacks {missing}, has beside {unknown}. It takes {', '.join(_KEYS)} and device.")
    return Entry(**item)
