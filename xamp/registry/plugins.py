"""Checks specs of third parties, and reads those that installed distributions offer as entry points.

``XAMP_PLUGINS`` says which entry points are read. Only their names are read before that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from xamp.contract import CONTRACT, BackendReport, BackendSpec
from xamp.errors import PolicyError
from xamp.registry.causes import one_line
from xamp.values.shown import shown

__all__ = [
    "ALIASES",
    "PLUGINS_VARIABLE",
    "EntryPoint",
    "PluginSpec",
    "allowed_points",
    "check_spec",
    "list_entry_points",
    "read_entry_points",
    "spec_of",
]

PLUGINS_VARIABLE = "XAMP_PLUGINS"
"""The variable that says which plugins are read: ``none``, or names of entry points; unset or empty: all."""

ALIASES = {"apex": "apex"}
"""Names that ``backend=`` and ``XAMP_BACKEND`` accept although no backend is registered under them, each with the op
policy that it stands for. The backend is that of the model's device, shown under this name."""

_RESERVED = frozenset({"auto", *ALIASES})  # names that a spec must not have, in lower case

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class PluginSpec(NamedTuple):
    """A spec from an entry point, and ``source``: name and version of the distribution that offers it."""

    spec: BackendSpec
    source: str

    def clashing_with(self, holder: str) -> BackendReport:
        """The row of :func:`xamp.available_backends` for this spec where ``holder`` already has its name."""
        return BackendReport(
            self.spec.name,
            self.spec.device_types,
            usable=False,
            reason=f"the name {self.spec.name!r} is already taken by {holder}",
            hint=f"uninstall one of the two, or have {self.source} choose another name",
            source=self.source,
            tested=self.spec.tested,
            priority=self.spec.priority,
        )


def check_spec(spec: object, call: str) -> BackendSpec:
    """Return ``spec`` if it is a well-formed :class:`~xamp.contract.BackendSpec`.

    Args:
        spec: what was given.
        call: the call to echo in the message.

    Raises:
        PolicyError: the spec is malformed; the message says what the field must be.
    """
    if not isinstance(spec, BackendSpec):
        raise PolicyError(f"{call}: must be an xamp.contract.BackendSpec, not {type(spec).__name__}")
    if type(spec.contract) is not int or spec.contract != CONTRACT:
        raise PolicyError(f"{call}: {_other_contract(spec.contract)}")
    # Read with getattr: a type checker trusts the annotations and would call these checks unreachable.
    fields = ("name", "device_types", "target", "priority", "masks", "causes", "ledger", "emulations")
    name, types, target, priority, masks, causes, ledger, emulations = (getattr(spec, field) for field in fields)
    hint, tested = (getattr(spec, field) for field in ("install_hint", "tested"))
    problem = ""
    if not _matches(_NAME, name) or name.lower() in _RESERVED:
        reserved = " or ".join(f'"{word}"' for word in sorted(_RESERVED, reverse=True))
        problem = f'name={shown(name)} must be letters, digits and "_.-", begin with a letter, and not be {reserved}'
    elif not isinstance(types, tuple) or not types or not all(_matches(_DEVICE_TYPE, kind) for kind in types):
        problem = f'device_types={shown(types)} must be a non-empty tuple of torch device types, such as ("cpu",)'
    elif not _matches(_TARGET, target):
        problem = f'target={shown(target)} must have the form "package.module:Class"'
    elif not isinstance(priority, int) or isinstance(priority, bool):
        problem = f"priority={shown(priority)} must be an int; the highest wins"
    elif not isinstance(hint, str):
        problem = f"install_hint={shown(hint)} must be a text: what to do where the backend's framework is missing"
    elif not isinstance(tested, bool):
        problem = f"tested={shown(tested)} must be True or False"
    elif not isinstance(masks, tuple) or not all(isinstance(mask, str) for mask in masks):
        problem = f"masks={shown(masks)} must be a tuple of names of environment variables"
    elif not isinstance(causes, str) or (causes and not _matches(_TARGET, causes)):
        problem = f'causes={shown(causes)} must have the form "package.module:NAME"'
    elif not isinstance(ledger, str):
        problem = f'ledger={shown(ledger)} must be a file, as "package:file" or a path'
    elif not isinstance(emulations, tuple) or not all(_is_emulation(each) for each in emulations):
        problem = f'emulations={shown(emulations)} must be a tuple of pairs (name, "package.module:function")'
    if problem:
        raise PolicyError(f"{call}: {problem}")
    return spec


def _other_contract(version: object) -> str:
    """The end of the error for a spec that was written for another version of the contract."""
    from xamp.values.version import __version__

    newer = isinstance(version, int) and version > CONTRACT
    fix = "Update xamp" if newer else "Update the package that ships the backend"
    return (
        f"it was written for version {shown(version)} of the contract between xamp and backends, and this xamp "
        f"({__version__}) has version {CONTRACT}. {fix}, or install releases of the two that belong together."
    )


def _names_what_is_gone(error: BaseException) -> bool:
    """Whether ``error`` says that a spec was made with a field which this version of the contract does not have."""
    return isinstance(error, TypeError) and "BackendSpec.__init__() got an unexpected keyword argument" in str(error)


def spec_of(fields: Mapping[str, Any]) -> BackendSpec:
    """The spec with these ``fields``, which were read from JSON: there a tuple has become a list."""
    return BackendSpec(**{name: _as_tuples(value) for name, value in fields.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _is_emulation(found: object) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and _matches(_NAME, found[0]) and _matches(_TARGET, found[1])


class EntryPoint(NamedTuple):
    """An entry point as its distribution describes it; only :meth:`read` imports its module.

    Attributes:
        name: its name.
        value: ``"module:NAME"`` of its spec.
        source: name and version of its distribution.
    """

    name: str
    value: str
    source: str

    @property
    def key(self) -> str:
        """A text that identifies the entry point: its name and its distribution."""
        return f"{self.name} ({self.source})"

    def read(self) -> PluginSpec | BackendReport:
        """Load the entry point. Return an unusable report with the reason where that raises or gives no valid spec."""
        try:
            found = metadata.EntryPoint(self.name, self.value, group="").load()
            return PluginSpec(check_spec(found, f"entry point {self.name} = {self.value}"), self.source)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            how = f"failed: {one_line(error)}"
            if _names_what_is_gone(error):
                how += (
                    f"; it was written for another version of the contract, of which this xamp has version {CONTRACT}"
                )
            return self.failed(how)

    def failed(self, how: str, hint: str = "") -> BackendReport:
        """The row of :func:`xamp.available_backends` for an entry point that cannot be loaded.

        Args:
            how: what happened; the end of a sentence whose subject is the entry point.
            hint: text to append to the cure "repair or uninstall".
        """
        reason, cure = f"its entry point {self.value!r} {how}", f"repair or uninstall {self.source}{hint}"
        return BackendReport(self.name, (), usable=False, reason=reason, hint=cure, source=self.source)


def list_entry_points(group: str) -> list[EntryPoint] | BackendReport:
    """The entry points of ``group``, by distribution and name, without loading any.

    Returns:
        The entry points. Where a damaged distribution, which may have nothing to do with xamp, prevents the listing,
        an unusable report instead.
    """
    try:
        found = [EntryPoint(point.name, point.value, _source(point)) for point in metadata.entry_points(group=group)]
    except Exception as error:
        hint = "a distribution on sys.path is damaged; `pip check` may name it"
        reason = f"entry points cannot be listed: {one_line(error)}"
        return BackendReport(group, (), usable=False, reason=reason, hint=hint, source="importlib.metadata")
    return sorted(found, key=lambda point: (point.source, point.name))


def allowed_points(points: Iterable[EntryPoint]) -> tuple[list[EntryPoint], list[BackendReport]]:
    """Return the entry points that :data:`PLUGINS_VARIABLE` lets xamp read, and a report on each other one.

    A name in the variable that no entry point has gets a report too.
    """
    points = list(points)
    said = os.environ.get(PLUGINS_VARIABLE, "")
    names = [name for part in said.split(",") if (name := part.strip())]
    if not names:
        return points, []
    wanted = [] if names == ["none"] else names
    known = {point.name for point in points}
    left_out = [
        BackendReport(
            point.name,
            (),
            usable=False,
            reason=f"{PLUGINS_VARIABLE}={said!r} leaves it out, so it was not read",
            hint=f"unset {PLUGINS_VARIABLE}, or add the name {point.name!r} to it",
            source=point.source,
        )
        for point in points
        if point.name not in wanted
    ]
    unknown = [
        BackendReport(
            name,
            (),
            usable=False,
            reason=f"{PLUGINS_VARIABLE}={said!r} names it, and nothing that is installed has such an entry point",
            hint=f"names to choose from: none, {', '.join(sorted(known)) or 'and there are no others'}",
            source=PLUGINS_VARIABLE,
        )
        for name in dict.fromkeys(wanted)
        if name not in known
    ]
    return [point for point in points if point.name in wanted], [*left_out, *unknown]


def read_entry_points(group: str) -> list[PluginSpec | BackendReport]:
    """Load the entry points of ``group`` that :data:`PLUGINS_VARIABLE` allows, by distribution and name.

    Returns:
        For each entry point a :class:`PluginSpec`, or an unusable report with the reason where it raised or gave no
        valid spec, or where it was not read. Raises only KeyboardInterrupt.
    """
    listed = list_entry_points(group)
    if isinstance(listed, BackendReport):
        return [listed]
    read, rest = allowed_points(listed)
    return [*(point.read() for point in read), *rest]


def _source(point: metadata.EntryPoint) -> str:
    """Name and version of the distribution that declares the entry point."""
    try:
        distribution = point.dist
        return f"{distribution.metadata['Name']} {distribution.version}" if distribution else "an unknown distribution"
    except Exception:
        return "a distribution without readable metadata"


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
