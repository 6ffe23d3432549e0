"""The records of an examination by ``doctor``: for each step what a child found, or how it ended; and the output rows.

A step is a pair: ``("torch", "")``, ``("load", key of an entry point)``, then for each backend ``("start", name)``,
``("declared", name)``, ``("settings", name)`` and ``("finished", name)``, and at the end ``("choose", "")``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from xamp.contract import BackendReport, BackendSpec
from xamp.registry.findings import DEFECT, NOTE, WARNING, Finding
from xamp.registry.plugins import EntryPoint, PluginSpec, spec_of
from xamp.registry.registry import BUILT_INS

__all__ = ["Known", "Record", "Step", "no_choice", "row_of"]

SLOW_LOAD, SLOW_START = 2.0, 10.0  # seconds: a spec's module imports nothing heavy; a device may start slowly
FLOOD = 1_000_000  # bytes

Record = dict[str, Any]
Step = tuple[str, str]


def row_of(report: BackendReport, **more: Any) -> Record:
    """A row: the fields of ``report``, and those that ``doctor`` adds, with defaults that ``more`` overrides."""
    added: Record = {"broken": False, "findings": [], "settings": [], "one_pass": "", "seconds": None, "printed": []}
    return {**dataclasses.asdict(report), **added, **more}


def no_choice(reason: str) -> Record:
    """The record of ``("choose", "")`` where no device can be chosen."""
    return {"chosen": {"device": None, "backend": None, "reason": reason}, "recommended": None}


class Known:
    """The records by step, and what follows from them.

    Attributes:
        records: what is known about each step.
        points: the entry points, by their keys.
        fatal: keys of the entry points that ended a process: one loaded alone, or one whose backend was started alone.
    """

    def __init__(self, points: Sequence[EntryPoint]) -> None:
        self.records: dict[Step, Record] = {}
        self.points = {point.key: point for point in points}
        self.fatal: set[str] = set()

    def keep(self, step: str, subject: str = "", **record: Any) -> None:
        """Add ``record`` to what is known about a step."""
        self.records.setdefault((step, subject), {}).update(record)

    def of(self, step: str, subject: str = "") -> Record:
        """What is known about a step; empty where nothing is."""
        return self.records.get((step, subject), {})

    def unloaded(self) -> list[str]:
        """Keys of the entry points that have no record yet."""
        return [key for key in self.points if ("load", key) not in self.records]

    def unstarted(self) -> list[str]:
        """Names of the backends whose examination is not finished."""
        return [spec.name for _, spec in self.specs() if ("finished", spec.name) not in self.records]

    def is_complete(self) -> bool:
        """Whether nothing is left to examine."""
        ends = ("torch", ""), ("choose", "")
        return not self.unloaded() and not self.unstarted() and all(end in self.records for end in ends)

    def specs(self) -> Iterator[tuple[str, BackendSpec]]:
        """Pairs of an entry point's key (empty for a built-in) and a spec; the first spec of a name holds the name."""
        taken = set()
        for key, spec in self._offered():
            if spec.name not in taken:
                taken.add(spec.name)
                yield key, spec

    def point_of(self, name: str) -> list[str]:
        """A list with the key of the entry point that a backend comes from; empty for a built-in."""
        return [key for key, spec in self.specs() if spec.name == name and key]

    def source_of(self, key: str) -> str:
        """The distribution of the entry point ``key``; ``"xamp"`` for a built-in."""
        return self.points[key].source if key else "xamp"

    def rows(self) -> list[Record]:
        """A row for each backend, and for each entry point without one; highest priority first, then by name."""
        rows, holders = [], dict[str, str]()
        for key, spec in self._offered():
            if spec.name in holders:
                rows.append(
                    row_of(PluginSpec(spec, self.source_of(key)).clashing_with(holders[spec.name]), broken=True)
                )
            else:
                holders[spec.name] = self.source_of(key)
                rows.append(self._row(key, spec))
        for key, point in self.points.items():
            if "failed" in self.of("load", key):
                load = self.of("load", key)
                printed, hint = load.get("printed", []), load.get("hint", "")
                rows.append(row_of(point.failed(load["failed"], hint), broken=True, printed=printed))
        return sorted(rows, key=lambda row: (-row["priority"], row["name"]))

    def _offered(self) -> Iterator[tuple[str, BackendSpec]]:
        yield from (("", spec) for spec in BUILT_INS)
        for key in self.points:
            load = self.of("load", key)
            if "spec" in load and "failed" not in load:
                yield key, spec_of(load["spec"])

    def _row(self, key: str, spec: BackendSpec) -> Record:
        start, declared, settings = (self.of(step, spec.name) for step in ("start", "declared", "settings"))
        found = [finding for step in (start, declared, settings) for finding in step.get("findings", [])]
        more = [dataclasses.asdict(finding) for finding in self._findings(key, spec)]
        row: Record = {**start["row"], "broken": start["broken"], "findings": [*found, *more]}
        printed = start.get("printed", []) if not row["usable"] or "ended" in start else []
        told = {"settings": settings.get("settings", []), "one_pass": declared.get("one_pass", "")}
        return {**row, **told, "seconds": start.get("seconds"), "printed": printed}

    def _findings(self, key: str, spec: BackendSpec) -> Iterator[Finding]:
        """The findings about a backend that come from the examination itself."""
        start, load = self.of("start", spec.name), self.of("load", key)
        for how in ("ended", "together"):
            if how in start:
                yield Finding(DEFECT, start[how], "report it to whoever ships the backend")
        if load.get("seconds", 0) >= SLOW_LOAD:
            waits = "everything that asks xamp for a backend waits for it"
            cure = "the module of a spec should import nothing heavy: tell whoever ships it"
            yield Finding(WARNING, f"its entry point takes {load['seconds']:.1f} s to load, and {waits}", cure)
        if start.get("seconds", 0) >= SLOW_START:
            yield Finding(WARNING, f"it takes {start['seconds']:.1f} s to start")
        size = load.get("printed_bytes", 0) + start.get("printed_bytes", 0)
        if size >= FLOOD:
            yield Finding(WARNING, f"it prints {size / 1e6:.1f} MB while it starts", "tell whoever ships it")
        masks = [f"{name}={os.environ[name]!r}" for name in spec.masks if name in os.environ]
        if masks and start["row"]["usable"]:
            yield Finding(NOTE, f"devices may be hidden by {' '.join(masks)}")
