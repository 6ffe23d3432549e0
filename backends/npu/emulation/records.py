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

__all__ = ["Records"]

_MODE = 0o750  # of the folders; torch_npu gives no others access


@dataclasses.dataclass
class _Last:
    """The newest work of a group."""

    seq: int
    op_type: str
    work: Any = None
    """torch's handle of a send or receive that has begun; None where ``ended`` says all."""
    ended: bool = False

    @property
    def status(self) -> str:
        """``"start"`` or ``"end"``."""
        ended = self.ended if self.work is None else self.work.is_completed()
        return "end" if ended else "start"


class Records:
    """The records of one group."""

    def __init__(self, options: Any, rank: int, size: int) -> None:
        self._group_id: str = options.group_id
        self._ranks: list[int] = list(options.global_ranks_in_group)
        self._rank, self._size = rank, size
        self._seq = self._count = 0  # collectives, and all work
        self._device = 0

    @contextlib.contextmanager
    def of(self, op_type: str, tensors: list[torch.Tensor], communicator: str) -> Iterator[None]:
        """Record a collective that the block does, and its failure.

        Args:
            op_type: as torch's ``OpType`` calls it.
            tensors: what goes in.
            communicator: the name of the group's communicator.
        """
        self._seq += 1
        last = self._begin(_Last(self._seq, op_type), tensors, communicator)
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        last.ended = True

    def peer_to_peer(self, op_type: str, tensors: list[torch.Tensor], communicator: str, work: Any) -> None:
        """Record a send or receive that has begun; ``work`` says when it has ended."""
        self._begin(_Last(self._seq, op_type, work), tensors, communicator)

    def _begin(self, last: _Last, tensors: list[torch.Tensor], communicator: str) -> _Last:
        self._count += 1
        if tensors:
            self._device = tensors[0].get_device()
        status, volumes = _status_file(), _volumes()
        if status is not None and self._group_id:
            status.note(self._group_id, "".join(f"{rank} " for rank in self._ranks), last)
            if not self._ranks:
                status.keep_writing(self._file_name())
        if volumes is not None:
            volumes.add(self._count, last.op_type, tensors, communicator)
        return last

    def _fail(self, error: BaseException) -> None:
        status = _status_file()
        if status is not None:
            status.fail(self._file_name(), str(error))

    def _file_name(self) -> tuple[int, str]:
        """The rank among all ranks, and the part of the file's name that says whose it is."""
        rank = self._ranks[self._rank] if self._ranks else self._rank
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return rank, f"{rank}_{address}_{self._device}_{self._size}"


class _StatusFile:
    """``torch_hccl_status-...log``: the newest work of each group of this process, in JSON."""

    def __init__(self, folder: Path, interval: float) -> None:
        self._folder, self._interval = folder, interval
        self._begun = _milliseconds()
        self._groups: dict[str, tuple[str, _Last]] = {}
        self._lock = threading.Lock()
        self._failure = ""
        self._writer: threading.Thread | None = None
        self._ends = threading.Event()

    def note(self, group_id: str, ranks: str, last: _Last) -> None:
        """Note the newest work of a group; ``ranks`` is empty for the group of all ranks."""
        with self._lock:
            self._groups[group_id] = ranks or "all", last

    def keep_writing(self, name: tuple[int, str]) -> None:
        """Renew the file from now on, and once more at the end of the process."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._renew, args=(name,), daemon=True, name="hccl status")
            self._writer.start()
            atexit.register(self._end)

    def fail(self, name: tuple[int, str], message: str) -> None:
        """Write the file at once; the first failure stays in it."""
        self._failure = self._failure or message
        self._write(name, ended=True)

    def _renew(self, name: tuple[int, str]) -> None:
        while not self._ends.wait(self._interval):
            self._write(name)
        self._write(name, ended=True)

    def _end(self) -> None:
        self._ends.set()
        if self._writer is not None:
            self._writer.join()

    def _write(self, name: tuple[int, str], ended: bool = False) -> None:
        """Write the file beside itself and put it in its place. Whatever fails is told: no training ends by it."""
        rank, owner = name
        with self._lock:
            content = {
                "last_comm_op": [
                    {"seq": last.seq, "op_type": last.op_type, "pg_id": group, "comm_ids": ranks, "status": last.status}
                    for group, (ranks, last) in self._groups.items()
                ],
                "is_master": rank == 0,
                "exception_message": self._failure,
                "global_pg_end_time": _milliseconds() if ended else self._begun,
            }
            path = self._folder / f"torch_hccl_status-{owner}_{os.getpid()}_{self._begun}.log"
            try:
                _make(self._folder)
                beside = path.with_name(f"{path.name}.tmp")
                beside.write_text(json.dumps(content) + "\n")
                beside.replace(path)
            except OSError as error:
                sys.stdout.write(f"[recordHcclStatus] failed: {error}\n")
                sys.stdout.flush()


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
            _make(self._folder)
            if count <= self._most:
                volume = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
                path = self._folder / f"{address}_{communicator}_{rank}.log"
                self._append(path, f"{op_type.lower()} {volume} {rank}")
            if count >= self._most:
                self._ended = True
                (self._folder / f"end_{address}_{os.getpid()}.log").touch(0o640)
        except OSError as error:
            raise RuntimeError(
                f"Failed to prepare NSLB_CP={self._folder}. Please verify the path is accessible and writable: {error} "
                "(emulated Ascend)"
            ) from error

    @staticmethod
    def _append(path: Path, line: str) -> None:
        algorithm = os.environ.get("HCCL_ALGO")
        begin = f"HCCL_ALGO={algorithm}\n" if algorithm is not None and not path.exists() else ""
        with path.open("a") as file:
            file.write(f"{begin}{line}\n")


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(_MODE, parents=True, exist_ok=True)


_lock = threading.Lock()


def _status_file() -> _StatusFile | None:
    """The process's status file; None unless the environment asked for it at the first collective."""
    with _lock:
        return _status_file_of(os.getpid())


def _volumes() -> _Volumes | None:
    """The process's files of NSLB; None unless the environment asked for them at the first collective."""
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
