"""Why something cannot be used, in words: the tables in which a backend writes down how it fails and what to do then.

A backend names its table in :attr:`~xamp.contract.BackendSpec.causes`. One table serves everywhere: when importing
torch fails, when the backend's probe does, and when ``doctor`` saw either of them end a process or hang. So a table,
and the module that it stands in, must need no framework.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from xamp._torch import TorchFailure
    from xamp.contract import BackendSpec

__all__ = [
    "Cause",
    "Diagnosis",
    "Failure",
    "explain",
    "explain_torch",
    "first_line",
    "full_text",
    "masked",
    "one_line",
    "table_of",
]

_REASON_LENGTH = 400
_CHAIN_LENGTH = 20  # chains are short; a cyclic one must not hang


class Diagnosis(NamedTuple):
    """What is wrong and what to do about it, one line each."""

    cause: str
    cure: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """How importing torch, or a backend's probe, failed.

    Attributes:
        kind: ``"exception"``, ``"crash"`` (it ended its process) or ``"timeout"`` (it did not finish). The latter two
            are seen by ``doctor`` alone, which looks from another process.
        text: of an exception its type and text and those of every error behind it, one a line; else what the process
            printed last.
        during: ``"torch"`` while importing torch, ``"probe"`` afterwards.
        environment: the environment variables of that process.
        masks: those of :attr:`~xamp.contract.BackendSpec.masks` that are set, with their values.
    """

    kind: str
    text: str
    during: str = "probe"
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    masks: Mapping[str, str] = dataclasses.field(default_factory=dict)


Explanation = Callable[[Failure], "tuple[str, str] | None"]


@dataclasses.dataclass(frozen=True)
class Cause:
    r"""One known way to fail: a row of a table. Where it takes more, a function of :class:`Failure` does as a row too.

    Attributes:
        pattern: a regular expression, searched in :attr:`Failure.text`.
        cause: what is wrong, one line; ``\1`` and ``\g<name>`` stand for groups of the pattern.
        cure: what to do about it, likewise.
        kinds: the kinds of failure it applies to.
        during: when it applies.
        masked: it says that there is no device, so that a mask variable that is set is the likelier cause.
    """

    pattern: str
    cause: str
    cure: str
    kinds: tuple[str, ...] = ("exception", "crash", "timeout")
    during: tuple[str, ...] = ("torch", "probe")
    masked: bool = False

    def __call__(self, failure: Failure) -> tuple[str, str] | None:
        """Cause and cure, where this row applies to ``failure``."""
        found = re.search(self.pattern, failure.text)
        if found is None or failure.kind not in self.kinds or failure.during not in self.during:
            return None
        behind_mask = masked(failure.masks) if self.masked else None
        return behind_mask or (found.expand(self.cause), found.expand(self.cure))


def masked(masks: Mapping[str, str]) -> Diagnosis | None:
    """What to say where there is no device while ``masks`` are set; None where none is."""
    if not masks:
        return None
    shown = " ".join(f"{name}={value!r}" for name, value in masks.items())
    return Diagnosis(f"no device is visible under {shown}", f"unset {next(iter(masks))}, or name devices in it")


def explain(spec: BackendSpec, failure: Failure) -> Diagnosis | None:
    """What the table of ``spec`` knows of ``failure``. Raises only KeyboardInterrupt, whatever the table does."""
    masks = {name: failure.environment[name] for name in spec.masks if name in failure.environment}
    try:
        return _first(table_of(spec), dataclasses.replace(failure, masks=masks))
    except KeyboardInterrupt:
        raise
    except BaseException:  # said by doctor, which reads each table by itself
        return None


def explain_torch(found: TorchFailure, specs: Iterable[BackendSpec]) -> TorchFailure:
    """``found`` in the words of the first backend that knows why: extensions that torch loads can break it."""
    if not found.text:
        return found
    failure = Failure(found.kind, found.text, "torch")
    known = next((known for spec in specs if (known := explain(spec, failure))), None) or _first(_OF_TORCH, failure)
    if known is None:
        return found
    detail = found.reason.removeprefix(_UNIMPORTABLE)
    return dataclasses.replace(found, reason=_UNIMPORTABLE + known.cause, hint=known.cure, detail=detail, text="")


def table_of(spec: BackendSpec) -> Sequence[Explanation]:
    """The rows of the table that ``spec`` names; none where it names none. Imports the table's module.

    Raises:
        TypeError: what it names is neither a function nor a sequence of them. Else what its module raises.
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
    """Type and text of ``error`` on one line, and of the first error behind it where it was raised from another."""
    *_, root = chain = list(_chain(error))
    return _named(error) if len(chain) == 1 else f"{_named(error)} (caused by {_named(root)})"


def first_line(error: BaseException) -> str:
    """The first line of the text of ``error`` that says something."""
    return next((line.strip() for line in _text(error).splitlines() if line.strip()), "no reason given")


def full_text(error: BaseException) -> str:
    """Type and whole text of ``error`` and of every error behind it."""
    return "\n".join(f"{type(link).__name__}: {_text(link)}" for link in _chain(error))


def _first(rows: Iterable[Explanation], failure: Failure) -> Diagnosis | None:
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


def _named(error: BaseException) -> str:
    text = " ".join(_text(error).split())
    if len(text) > _REASON_LENGTH:
        text = text[: _REASON_LENGTH - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- torch's own: what no backend has to know, asked last

_UNIMPORTABLE = "torch cannot be imported: "
_EXTENSION = r"Failed to load the backend extension: ([\w.-]+?)\.?(?:\s|$)"


def _of_an_extension(failure: Failure) -> tuple[str, str] | None:
    found = re.search(_EXTENSION, failure.text)
    if found is None:
        return None
    behind = " ".join(failure.text.splitlines()[-1].split())[:_REASON_LENGTH]
    return (
        f"the extension {found[1]}, which torch loads by itself, fails: {behind}",
        f"repair what the error names (driver, toolkit, matching versions), or do without {found[1]}: uninstall it, or "
        "set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    )


_OF_TORCH: tuple[Explanation, ...] = (
    Cause(
        r"(\S+): cannot allocate memory in static TLS block",
        r"\1 was loaded too late to find room in static TLS",
        r"have it loaded first: start with LD_PRELOAD=\1",
    ),
    _of_an_extension,
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
