"""What ProcessGroupHCCL writes down about its own work where the environment asks for it.

- ``TORCH_HCCL_STATUS_SAVE_ENABLE``: a file for each process that says how far each group is, renewed every few seconds.
- ``NSLB_CP``: how many bytes the first collectives move, for a network that spreads its load.

Source: ``recordHcclStatus``, ``recordDataVol`` and ``nslb_record_end`` in torch_npu's ``ProcessGroupHCCL.cpp``.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from xamp.backends.npu.emulation.refusals import LOST

__all__ = ["Records"]

_FOLDER_MODE, _FILE_MODE = 0o750, 0o640  # torch_npu gives others no access


@dataclasses.dataclass
class _Last:
    """The newest work of a group."""

    seq: int
    op_type: str
    work: Any = None
    """torch's handle of a send or receive that has begun. It keeps their memory."""
    ended: bool = False

    def settle(self) -> str:
        """Return ``"start"`` or ``"end"``, and let go of what has ended."""
        if self.work is not None and self.work.is_completed():
            self.ended, self.work = self.work.is_success(), None
        return "end" if self.ended else "start"


class Records:
    """The records of one group."""

    def __init__(self, options: Any, rank: int, size: int) -> None:
        self._group_id: str = options.group_id
        self._ranks = "".join(f"{each} " for each in options.global_ranks_in_group)
        self._seq = self._count = 0  # collectives, and all work
        self._inside = False  # a collective that is made of another one is one
        self._status = _status_file() if self._group_id else None
        self._is_default = bool(self._group_id) and not self._ranks
        if self._status is not None and self._is_default:
            self._status.open(rank, size)

    def close(self) -> None:
        """Write the status for the last time, where this is the group of all ranks."""
        if self._status is not None and self._is_default:
            self._status.close()

    @contextlib.contextmanager
    def of(self, op_type: str, tensors: list[torch.Tensor], communicator: str) -> Iterator[None]:
        """Record a collective that the block does, and if a rank is gone, that. A call that is refused is no failure.

        Args:
            op_type: as torch's ``OpType`` calls it.
            tensors: what goes in.
            communicator: the name of the group's communicator.
        """
        if self._inside:
            yield
            return
        self._seq += 1
        last = self.begin(op_type, tensors, communicator)
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            if self._status is not None and LOST in str(error):
                self._status.fail(str(error))
            raise
        finally:
            self._inside = False
        last.ended = True

    def begin(self, op_type: str, tensors: list[torch.Tensor], communicator: str) -> _Last:
        """Record work that begins; the caller sets ``work`` of the result, or ``ended``."""
        self._count += 1
        last = _Last(self._seq, op_type)
        volumes = _volumes()
        if volumes is not None:
            volumes.add(self._count, op_type, tensors, communicator)
        if self._status is not None:
            self._status.note(self._group_id, self._ranks or "all", last, tensors)
        return last


class _StatusFile:
    """``torch_hccl_status-...log``: the newest work of each group of this process, in JSON."""

    def __init__(self, folder: Path, interval: float) -> None:
        self._folder, self._interval = folder, interval
        self._begun, self._process = _milliseconds(), os.getpid()
        self._rank, self._size, self._device = 0, 1, -1
        self._groups: dict[str, tuple[str, _Last]] = {}
        self._failure = ""
        self._lock = threading.RLock()
        self._writer: tuple[threading.Thread, threading.Event] | None = None
        atexit.register(self.close)

    def open(self, rank: int, size: int) -> None:
        """Renew the file from now on; the arguments are of the group of all ranks."""
        self.close()
        self._rank, self._size, ends = rank, size, threading.Event()
        writer = threading.Thread(target=self._renew, args=(ends,), daemon=True, name="hccl status")
        self._writer = writer, ends
        writer.start()

    def close(self) -> None:
        """Write the file for the last time."""
        if self._writer is None or os.getpid() != self._process:
            return
        (writer, ends), self._writer = self._writer, None
        ends.set()
        writer.join()
        self._write(ended=True)

    def note(self, group_id: str, ranks: str, last: _Last, tensors: list[torch.Tensor]) -> None:
        """Note the newest work of a group."""
        with self._lock:
            self._groups[group_id] = ranks, last
            if self._device < 0 and tensors:
                self._device = tensors[0].get_device()

    def fail(self, message: str) -> None:
        """Write the file at once; the first failure stays in it."""
        self._failure = self._failure or message
        self._write(ended=True)

    def _renew(self, ends: threading.Event) -> None:
        while not ends.wait(self._interval):
            self._write()

    def _write(self, ended: bool = False) -> None:
        """Write the file beside itself and put it in its place. Whatever fails is told: no training ends by it."""
        with self._lock:
            if not self._groups:
                return
            content = {
                "last_comm_op": [
                    {"seq": last.seq, "op_type": last.op_type, "pg_id": group, "comm_ids": ranks, "status": status}
                    for group, (ranks, last) in self._groups.items()
                    for status in [last.settle()]
                ],
                "is_master": self._rank == 0,
                "exception_message": self._failure,
                "global_pg_end_time": _milliseconds() if ended else self._begun,
            }
            try:
                self._put(json.dumps(content) + "\n")
            except OSError as error:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody may read the output any more
                    sys.stdout.write(f"[recordHcclStatus] failed: {error}\n")
                    sys.stdout.flush()

    def _put(self, text: str) -> None:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        owner = f"{self._rank}_{address}_{max(self._device, 0)}_{self._size}_{self._process}_{self._begun}"
        path = self._folder / f"torch_hccl_status-{owner}.log"
        beside = path.with_name(f"{path.name}.tmp")
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(_FOLDER_MODE)
        with open(beside, "w", opener=_for_us) as file:
            file.write(text)
        beside.replace(path)


class _Volumes:
    """The files of NSLB: a line for each of the first pieces of work, and an empty file once all are written."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._ended = False

    def add(self, count: int, op_type: str, tensors: list[torch.Tensor], communicator: str) -> None:
        """Write the line of a group's piece of work number ``count``.

        Raises:
            RuntimeError: the folder cannot be written to, or no ``RANK`` or ``MASTER_ADDR`` says who writes.
        """
        if self._ended:
            return
        for name, what in (("RANK", "global rank for NSLB"), ("MASTER_ADDR", "master IP addr")):
            if name not in os.environ:
                raise RuntimeError(f"Unable to fetch {what}: the environment has no {name} (emulated Ascend)")
        address, rank = os.environ["MASTER_ADDR"], os.environ["RANK"]
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(_FOLDER_MODE, exist_ok=True)
            if count <= self._most:
                path = self._folder / f"{address}_{communicator}_{rank}.log"
                self._append(path, f"{op_type.lower()} {_bytes(tensors)} {rank}")
            if count >= self._most:
                self._ended = True
                (self._folder / f"end_{address}_{os.getpid()}.log").touch(_FILE_MODE)
        except OSError as error:
            raise RuntimeError(
                f"Failed to prepare NSLB_CP={self._folder}. Please verify the path is accessible and writable: {error} "
                "(emulated Ascend)"
            ) from error

    @staticmethod
    def _append(path: Path, line: str) -> None:
        algorithm = os.environ.get("HCCL_ALGO")
        begin = f"HCCL_ALGO={algorithm}\n" if algorithm is not None and not path.exists() else ""
        with open(path, "a", opener=_for_us) as file:
            file.write(f"{begin}{line}\n")


def _bytes(tensors: list[torch.Tensor]) -> int:
    """What one tensor's storage holds; of a list, which torch_npu copies into one, the numbers themselves."""
    if len(tensors) == 1:
        return tensors[0].untyped_storage().nbytes()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _for_us(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


_lock = threading.Lock()


def _status_file() -> _StatusFile | None:
    """The process's status file; None unless the environment asks for it when its first group is made."""
    with _lock:
        return _status_file_of(os.getpid())


def _volumes() -> _Volumes | None:
    """The process's files of NSLB; None unless the environment asks for them at its first collective."""
    with _lock:
        return _volumes_of(os.getpid())


@functools.cache  # a process that was forked writes files of its own
def _status_file_of(_process: int) -> _StatusFile | None:
    if not _number("TORCH_HCCL_STATUS_SAVE_ENABLE", 0):
        return None
    interval = _number("TORCH_HCCL_STATUS_SAVE_INTERVAL", 2)
    return _StatusFile(Path(os.environ.get("TORCH_HCCL_STATUS_SAVE_PATH", "/tmp")), interval if interval > 0 else 2)


@functools.cache
def _volumes_of(_process: int) -> _Volumes | None:
    folder = os.environ.get("NSLB_CP")
    return None if folder is None else _Volumes(Path(folder), _number("NSLB_MAX_RECORD_NUM", 1000))


def _number(name: str, missing: int) -> int:
    """A variable as C reads it: the number at its begin, 0 if there is none."""
    text = os.environ.get(name)
    found = re.match(r"\s*[-+]?\d+", text or "")
    return missing if text is None else int(found[0]) if found else 0
