"""Explains failures: looks up the cause and the cure of an error in the tables of causes that backends supply.

A backend names its table in :attr:`~xamp.contract.BackendSpec.causes`. The same table is read when importing torch
fails, when the backend's probe fails, and when ``doctor`` saw either of them end a process or hang. So a table, and the
module that holds it, must import no framework.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xamp.contract import BackendSpec, Cause, Diagnosis, Explanation, Failure
from xamp.errors import StateError

__all__ = [
    "NotNow",
    "TorchFailure",
    "explain",
    "explain_torch",
    "first_line",
    "first_sentence",
    "full_text",
    "is_in_use",
    "one_line",
    "table_of",
]

_REASON_LENGTH = 400
_IN_USE = re.compile(r"out of memory|resource busy|busy or unavailable|cannot allocate memory(?! in static)", re.I)
_CHAIN_LENGTH = 20  # chains are short; a cyclic one must not hang


class NotNow(StateError):
    """A device was to be tried where a trial would do harm, so nothing was found out."""


class TorchFailure(NamedTuple):
    """Why torch cannot be used.

    Attributes:
        reason: the cause, one line.
        hint: the cure, one line.
        error: what ``import torch`` raised; None where torch imports but is not a torch that xamp can use.
        kind: see :attr:`xamp.contract.Failure.kind`.
        text: see :attr:`xamp.contract.Failure.text`; empty where there is nothing to explain.
        detail: the error itself, one line, where ``reason`` comes from a table of causes.
    """

    reason: str
    hint: str
    error: BaseException | None = None
    kind: str = "exception"
    text: str = ""
    detail: str = ""


def explain(spec: BackendSpec, failure: Failure) -> Diagnosis | None:
    """The cause and the cure from the table of ``spec``; None where it has none. Raises only KeyboardInterrupt."""
    masks = {name: failure.environment[name] for name in spec.masks if name in failure.environment}
    try:
        return _first_match(table_of(spec), dataclasses.replace(failure, masks=masks))
    except KeyboardInterrupt:
        raise
    except BaseException:  # doctor reports it: it reads each table separately
        return None


def explain_torch(found: TorchFailure, specs: Iterable[BackendSpec]) -> TorchFailure:
    """``found`` with the cause and the cure of the first table that knows it: an extension can break torch's import."""
    if not found.text:
        return found
    failure = Failure(found.kind, found.text, "torch")
    known = next((known for spec in specs if (known := explain(spec, failure))), None) or _first_match(
        _TORCH_CAUSES, failure
    )
    if known is None:
        return found
    detail = found.reason.removeprefix(_UNIMPORTABLE)
    return found._replace(reason=_UNIMPORTABLE + known.cause, hint=known.cure, detail=detail, text="")


def table_of(spec: BackendSpec) -> Sequence[Explanation]:
    """The rows of the table that ``spec`` names; empty where it names none. Imports the table's module.

    Raises:
        TypeError: the spec names neither a function nor a sequence of functions. What the module raises is passed on.
    """
    if not spec.causes:
        return ()
    module, _, path = spec.causes.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    rows = (found,) if callable(found) else found
    if not isinstance(rows, Sequence) or not all(callable(row) for row in rows):
        raise TypeError(f"{spec.causes} is {found!r}, neither a function nor a sequence of xamp.contract.Cause")
    return rows


def one_line(error: BaseException) -> str:
    """Type and text of ``error`` on one line; then those of the root cause where ``error`` was raised from another."""
    *_, root = chain = list(_chain(error))
    return _type_and_text(error) if len(chain) == 1 else f"{_type_and_text(error)} (caused by {_type_and_text(root)})"


def first_line(error: BaseException) -> str:
    """The first line of the text of ``error`` that is not blank."""
    return next((line.strip() for line in _text(error).splitlines() if line.strip()), "no reason given")


def first_sentence(text: str) -> str:
    """The first sentence of ``text``, without its full stop. Those of torch's errors may go on for a kilobyte."""
    sentence = re.split(r"[.!?]\s", text.strip(), maxsplit=1)[0].rstrip(".")
    return sentence if len(sentence) <= _REASON_LENGTH else sentence[: _REASON_LENGTH - 3] + "..."


def full_text(error: BaseException) -> str:
    """Type and whole text of ``error`` and of every error that it was raised from."""
    return "\n".join(f"{type(link).__name__}: {_text(link)}" for link in _chain(error))


def is_in_use(error: BaseException) -> bool:
    """Whether ``error``, or one behind it, says that the device is busy, or that no memory is left."""
    return any(
        isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError" or _IN_USE.search(_text(link))
        for link in _chain(error)
    )


def _first_match(rows: Iterable[Explanation], failure: Failure) -> Diagnosis | None:
    for row in rows:
        known = row(failure)
        if known is not None:
            cause, cure = known
            return Diagnosis(" ".join(str(cause).split()), str(cure).strip())
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_CHAIN_LENGTH):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def _type_and_text(error: BaseException) -> str:
    text = " ".join(_text(error).split())
    if len(text) > _REASON_LENGTH:
        text = text[: _REASON_LENGTH - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- the table of torch's own failures, read after those of the backends

_UNIMPORTABLE = "torch cannot be imported: "
_EXTENSION = r"Failed to load the backend extension: ([\w.-]+?)\.?(?:\s|$)"


def _explain_extension(failure: Failure) -> tuple[str, str] | None:
    found = re.search(_EXTENSION, failure.text)
    if found is None:
        return None
    behind = " ".join(failure.text.splitlines()[-1].split())[:_REASON_LENGTH]
    return (
        f"the extension {found[1]}, which torch loads by itself, fails: {behind}",
        f"repair what the error names (driver, toolkit, matching versions), or do without {found[1]}: uninstall it, or "
        "set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    )


_TORCH_CAUSES: tuple[Explanation, ...] = (
    Cause(
        r"(\S+): cannot allocate memory in static TLS block",
        r"\1 was loaded too late to find room in static TLS",
        r"have it loaded first: start with LD_PRELOAD=\1",
    ),
    _explain_extension,
    Cause(
        r"partially initialized module 'torch'.*\((.*)\)",
        r"a module in the way has the name of one of torch's, or torch is half installed (\1)",
        "rename the file that has the name, or reinstall torch",
    ),
    Cause(
        r"version [`'](GLIBC(?:XX)?_[\d.]+)' not found",
        r"this system's C or C++ library lacks \1, which this build of torch needs",
        "install a build of torch for this system, or use a newer system or container",
    ),
    Cause(
        r"undefined symbol: (\S+)",
        r"libraries of different versions are mixed (undefined symbol \1)",
        "reinstall torch, and what was built against it, in versions that belong together",
    ),
    Cause(
        r"\[WinError (?:126|1114)\]|DLL load failed",
        "a DLL that torch needs is missing or does not start",
        "install Microsoft's Visual C++ Redistributable, then reinstall torch",
    ),
)
