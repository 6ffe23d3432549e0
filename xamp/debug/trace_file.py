"""The file of a trace: what is in it, how it is written and read.

The file is a row of frames. A frame is a kind (one letter), 3 zero bytes, the length of its content and the CRC-32 of
its content (unsigned 32-bit numbers), then the content. All numbers are little-endian; floats have 32 bits. Each frame
is written by one call, so that a process that is killed leaves whole frames and at most one broken one, at the end.

====  ======================================================================================================
kind  content
====  ======================================================================================================
H     JSON: ``what`` (``"xamp trace"``), ``schema`` (1), ``xamp``, ``torch``, ``device``, ``device_name``, ``level``,
      ``dtype``, ``every``, ``rank``, ``note``. The first frame.
N     JSON: ``activations`` (names of modules in the order of their first call), ``parameters`` (names),
      ``owners`` (for each parameter the name of its module). Holds for the samples after it.
S     the number of the first step and the number of rows, unsigned 32-bit; then for each row ``loss``, ``scale``,
      ``skipped`` (1: the step was skipped), ``norm`` (of the gradients, as ``clip_grad_norm_`` returned it). nan: not
      known.
L     the numbers of the steps of the S before it whose loss was not given, unsigned 32-bit: nan does not tell. Files of
      older releases have no such frame.
M     a sample: the number of the step, unsigned 32-bit; then for each activation its root mean square, its largest
      absolute value and its share of zeros; then for each parameter the norm of its gradient, its own norm before the
      step, and the norm of what the step changed. -1: the parameter had no gradient.
E     empty: the trace was closed.
====  ======================================================================================================

A reader takes frames up to the first broken one. It refuses a schema that it does not know, and skips kinds that it
does not know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xamp.errors import PolicyError

__all__ = [
    "NO_GRADIENT",
    "SCHEMA",
    "WHAT",
    "Row",
    "Run",
    "Sample",
    "frame",
    "names_frame",
    "no_loss_frame",
    "read",
    "rows_frame",
    "sample_frame",
]

WHAT, SCHEMA = "xamp trace", 1
NO_GRADIENT = -1.0
_HEAD = struct.Struct("<c3xII")
_PAIR = struct.Struct("<II")
_STEP = struct.Struct("<I")
_LONGEST = 1 << 30


class Row(NamedTuple):
    """One step: its loss, the loss scale after it, whether it was skipped, and the norm that clipping found."""

    loss: float
    scale: float
    skipped: float
    norm: float


class Sample(NamedTuple):
    """The statistics of one step.

    Attributes:
        activations: by module: root mean square, largest absolute value, share of zeros.
        parameters: by parameter: norm of the gradient, its own norm before the step, norm of the change.
        owners: by parameter: the name of its module.
    """

    activations: Mapping[str, tuple[float, float, float]]
    parameters: Mapping[str, tuple[float, float, float]]
    owners: Mapping[str, str]


@dataclasses.dataclass
class Run:
    """What a file holds.

    Attributes:
        path: the file.
        header: its first frame.
        rows: each step.
        samples: the sampled steps.
        without_loss: the steps whose loss was not given; None: the file does not tell them from losses that are nan.
        closed: the trace was closed; else the process ended before.
    """

    path: str
    header: dict[str, Any]
    rows: dict[int, Row] = dataclasses.field(default_factory=dict)
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)
    without_loss: set[int] | None = None
    closed: bool = False

    @property
    def about(self) -> str:
        """The run in a few words."""
        found = self.header
        where = found.get("device_name") or found.get("device", "")
        return f"level {found.get('level')} on {where}, torch {found.get('torch')}, {len(self.rows)} steps"


def frame(kind: str, content: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind.encode(), len(content), zlib.crc32(content)) + content


def names_frame(activations: Sequence[str], parameters: Sequence[str], owners: Sequence[str]) -> bytes:
    """Return the frame of the names that later samples use."""
    names = {"activations": list(activations), "parameters": list(parameters), "owners": list(owners)}
    return frame("N", json.dumps(names, separators=(",", ":")).encode())


def rows_frame(first: int, numbers: Sequence[float]) -> bytes:
    """Return the frame of some steps; ``numbers`` has the four of each :class:`Row`, one row after the other."""
    return frame("S", _PAIR.pack(first, len(numbers) // 4) + struct.pack(f"<{len(numbers)}f", *map(_single, numbers)))


def no_loss_frame(steps: Sequence[int]) -> bytes:
    """Return the frame of those of the steps just written whose loss was not given."""
    return frame("L", struct.pack(f"<{len(steps)}I", *steps))


def sample_frame(step: int, numbers: Sequence[float]) -> bytes:
    """Return the frame of a sample."""
    return frame("M", _STEP.pack(step) + struct.pack(f"<{len(numbers)}f", *map(_single, numbers)))


def _single(number: float) -> float:
    """Return ``number``, or inf where it is too large for 32 bits."""
    return number if not math.isfinite(number) or abs(number) < 3.4e38 else math.copysign(math.inf, number)


def read(path: str | Path) -> Run:
    """Read a trace, up to its last whole frame.

    Args:
        path: the file that :func:`xamp.trace` wrote.

    Raises:
        PolicyError: the file cannot be read, is no trace, or has a schema that this xamp does not know.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PolicyError(
            f"{str(path)!r} cannot be read: {error.strerror}. Name a file that xamp.trace wrote."
        ) from error
    frames = _frames(data)
    kind, content = next(frames, ("", b""))
    header = _json(content) if kind == "H" else None
    if header is None or header.get("what") != WHAT:
        raise PolicyError(f"{str(path)!r} is no trace. Name a file that xamp.trace wrote.")
    if header.get("schema") != SCHEMA:
        raise PolicyError(
            f"{str(path)!r} has schema {header.get('schema')!r}, and this xamp reads schema {SCHEMA}. Read it with the "
            f"xamp that wrote it ({header.get('xamp')}), or a newer one."
        )
    run = Run(str(path), header)
    names: dict[str, list[str]] = {"activations": [], "parameters": [], "owners": []}
    for kind, content in frames:
        if kind == "N":
            names = _json(content) or names
        elif kind == "S":
            _add_rows(run, content)
        elif kind == "L":
            run.without_loss = {*(run.without_loss or ()), *(step for (step,) in _STEP.iter_unpack(content))}
        elif kind == "M":
            _add_sample(run, content, names)
        run.closed = run.closed or kind == "E"
    return run


def _frames(data: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at + _HEAD.size <= len(data):
        kind, length, check = _HEAD.unpack_from(data, at)
        content = data[at + _HEAD.size : at + _HEAD.size + length]
        if length > _LONGEST or len(content) < length or zlib.crc32(content) != check:
            return
        yield kind.decode("latin-1"), content
        at += _HEAD.size + length


def _json(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _add_rows(run: Run, content: bytes) -> None:
    first, count = _PAIR.unpack_from(content)
    for index, numbers in enumerate(struct.iter_unpack("<4f", content[_PAIR.size : _PAIR.size + 16 * count])):
        run.rows[first + index] = Row(*numbers)


def _add_sample(run: Run, content: bytes, names: Mapping[str, list[str]]) -> None:
    (step,) = _STEP.unpack_from(content)
    triples = list(struct.iter_unpack("<3f", content[_STEP.size :]))
    modules, parameters = names["activations"], names["parameters"]
    if len(triples) != len(modules) + len(parameters):
        return
    run.samples[step] = Sample(
        dict(zip(modules, triples, strict=False)),
        dict(zip(parameters, triples[len(modules) :], strict=True)),
        dict(zip(parameters, names["owners"], strict=True)),
    )
