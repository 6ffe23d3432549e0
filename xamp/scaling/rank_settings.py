"""Finds out, once, whether all ranks that share a model were given the same settings.

Ranks that differ in level or loss scale train wrong weights, or abort inside of a collective call. So each rank writes
its settings into the store of the process group at its first ``scale_loss``, and reads those of the others. A store
needs no partner as a collective call does: a rank that never comes here holds nobody up who does not wait for it.

Ranks wait for each other only where a wrapper shares their parameters, and so makes them wait in each backward anyway.
Otherwise each compares with those that have written already: a rank that writes before it reads cannot miss another one
that does so too, so of two that differ at least the later one finds it. After the first collective call of the engine
all have written, and then everybody looks again.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xamp.errors import PolicyError, StateError
from xamp.ground.torch_private.distributed import process_group_store

__all__ = ["OF_THE_SCALE", "RankSettings", "ScalerSettings"]

OF_THE_SCALE = (
    *("enabled", "level", "dynamic", "static_scale", "checks", "num_losses", "init_scale", "growth_factor"),
    *("backoff_factor", "growth_interval", "min_loss_scale", "max_loss_scale", "loss_scale"),
)
"""The settings that ranks must share that only decide together. The stages of a pipeline differ in the others."""

_LOOKS = 3  # how often a rank looks for settings of those for which it does not wait

_rounds: collections.Counter[tuple[str, str]] = collections.Counter()  # sessions so far, by group and name


class _Meeting:
    """One place in the store of a process group where the settings of its ranks stand. Making it writes this rank's.

    Args:
        group: the process group.
        settings: names and values.
        name: what tells the sessions of a rank apart. The first session under a name on one rank meets the first on
            another, and so on.
        compared: names of the settings that must be equal; empty: all but those that begin with an underscore.
    """

    said = "scale_loss: ranks that share a model were given different settings: "
    cure = (
        "Give initialize the same arguments and the same checkpoint on every rank, or process_group=, the ranks that "
        "decide together. Call scale_loss of several sessions in one order on every rank."
    )

    def __init__(self, group: Any, name: str, settings: Mapping[str, str], compared: Sequence[str]) -> None:
        self._store: Any = process_group_store(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._compared = compared or [key for key in settings if not key.startswith("_")]
        self.known: dict[int, dict[str, str]] = {}  # by rank, what it has written
        _rounds[(group.group_name, name)] += 1
        self._key = f"xamp/{name}/{_rounds[(group.group_name, name)]}"
        self._looks = 0
        self._store.set(self._key_of(dist.get_rank()), json.dumps(settings))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare."""
        return self._looks >= _LOOKS

    def wait(self) -> None:
        """Wait until all ranks have written.

        Raises:
            StateError: some have not within the store's timeout, which ``init_process_group`` was given.
            PolicyError: some have not, and another one has other settings.
        """
        try:
            self._store.wait([self._key_of(rank) for rank in self._ranks])
        except RuntimeError as error:
            self.compare()  # one that differs may have ended for that
            missing = [rank for rank in self._ranks if not self._store.check([self._key_of(rank)])]
            raise StateError(
                f"scale_loss: {_listed(missing)} did not come to a scale_loss of this model, and the wrapper around it "
                f"or process_group= says that all ranks share it: {str(error).splitlines()[0]}. Look into the log of "
                "the missing, and call xamp.scale_loss in the same steps on every rank of the group."
            ) from error

    def compare(self) -> None:
        """Compare with the settings of all ranks that have written.

        Raises:
            PolicyError: a rank has others. The message names ranks and settings.
        """
        self._looks += 1
        self.known = known = {rank: self._read(rank) for rank in self._ranks if self._store.check([self._key_of(rank)])}
        if all(known.values()) and len(known) == len(self._ranks):
            self._looks = _LOOKS
        different = {
            name: values
            for name in self._compared
            if len(set((values := {rank: told.get(name, "") for rank, told in known.items() if told}).values())) > 1
        }
        for first in ("enabled", "level"):  # which decide on many others
            if first in different:
                different = {first: different[first]}
        if different:
            raise PolicyError(
                f"{self.said}{_told(different)}. Their gradients would not add up, and their weights drift apart. "
                f"{self.cure}"
            )

    def _read(self, rank: int) -> dict[str, str]:
        written = self._store.get(self._key_of(rank))
        found: dict[str, str] = json.loads(written) if written else {}
        return found

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"


class _ScalersMeeting(_Meeting):
    """The same of a :class:`xamp.GradScaler`."""

    said = "GradScaler: ranks that decide together were given different settings: "
    cure = (
        "Give GradScaler the same arguments and the same state on every rank, or set its process_group, the ranks that "
        "decide together."
    )


class RankSettings:
    """Compares the settings of one session with those of the other ranks.

    Attributes:
        is_settled: nothing is left to compare, as long as no wrapper appears.
    """

    meeting: type[_Meeting] = _Meeting

    def __init__(self) -> None:
        self.is_settled = False
        self._met: set[tuple[str, str]] = set()
        self._open: list[_Meeting] = []
        self._heard: dict[str, set[str]] = {}

    def heard(self, key: str) -> set[str]:
        """Return the values of one setting on all ranks, as far as they have told them."""
        return self._heard.get(key, set())

    def meet(
        self,
        groups: Sequence[Any],
        name: Callable[[Any], str],
        settings: Mapping[str, str],
        *,
        waits: bool,
        compared: Sequence[str] = (),
    ) -> None:
        """Write ``settings`` into the stores of ``groups``, and compare them with those of the other ranks.

        Args:
            groups: process groups. One where the session met already is left out.
            name: gives the name for a group; see :class:`_Meeting`.
            settings: names and values.
            waits: wait for all ranks.
            compared: see :class:`_Meeting`.
        """
        new = self._write(groups, name, settings, compared)
        self._open += new
        for meeting in new if waits else ():
            meeting.wait()
        self.look()

    def tell(self, groups: Sequence[Any], name: Callable[[Any], str], settings: Mapping[str, str]) -> None:
        """Write ``settings`` for others to read, and compare nothing. See :meth:`meet`."""
        self._write(groups, name, settings, ())
        self.is_settled = not self._open

    def _write(
        self, groups: Sequence[Any], name: Callable[[Any], str], settings: Mapping[str, str], compared: Sequence[str]
    ) -> list[_Meeting]:
        """Write into the stores of those of ``groups`` where the session has not met under ``name``."""
        new = []
        group: Any
        for group in groups:
            group = dist.group.WORLD if group is None else group
            met = group.group_name, name(group)
            if met not in self._met:
                self._met.add(met)
                new.append(self.meeting(group, met[1], settings, compared))
        return new

    def look(self) -> None:
        """Compare again where some rank had not written yet."""
        for meeting in self._open:
            meeting.compare()
            for key, value in (pair for told in meeting.known.values() for pair in told.items()):
                self._heard.setdefault(key, set()).add(value)
        self._open = [meeting for meeting in self._open if not meeting.is_over]
        self.is_settled = not self._open


class ScalerSettings(RankSettings):
    """The same of a :class:`xamp.GradScaler`.

    It waits for nobody, for nothing tells which ranks have one. Two are compared whose first optimizers have parameters
    of the same shapes.
    """

    meeting = _ScalersMeeting

    def compare(self, groups: Sequence[Any], params: Iterable[torch.Tensor], settings: Mapping[str, str]) -> None:
        """Compare with the scalers of the ranks in ``groups``, which hold the same ``params``.

        Raises:
            PolicyError: a rank has others. The message names ranks and settings.
        """
        name = self._name_of(params)
        self.meet(groups, lambda _: name, settings, waits=False)

    def tell_off(self, groups: Sequence[Any], params: Iterable[torch.Tensor]) -> None:
        """Tell the others that this rank's scaler is switched off."""
        name = self._name_of(params)
        self.tell(groups, lambda _: name, {"enabled": "False"})

    @staticmethod
    def _name_of(params: Iterable[torch.Tensor]) -> str:
        shapes = repr([tuple(param.shape) for param in params])
        return f"GradScaler/{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


def _told(different: Mapping[str, Mapping[int, str]]) -> str:
    """Return the settings that differ, by value and rank: ``level O1 on rank 0 and O4 on ranks 1 and 2``."""
    told = []
    for name, values in different.items():
        holders: dict[str, list[int]] = {}
        for rank, value in values.items():
            holders.setdefault(value, []).append(rank)
        told.append(f"{name} " + " and ".join(f"{value} on {_listed(ranks)}" for value, ranks in holders.items()))
    return "; ".join(told)


def _listed(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 3, 4, 5``; of many the first eight."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
