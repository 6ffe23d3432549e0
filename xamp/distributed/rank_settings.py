"""Finds out, once, whether all ranks that share a model were given the same settings.

Ranks that differ in level or loss scale train wrong weights, or abort inside of a collective call. So each writes its
settings into the store of the process group at its first ``scale_loss``, and reads those of the others.

Ranks wait for each other only where a wrapper shares their parameters, and so makes them wait in each backward anyway.
Else each compares with those that have written already. A rank writes before it reads, so of two that differ the later
one finds it at least. After the first collective call of the engine all have written, and all compare again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xamp.distributed.ddp import search
from xamp.distributed.ranks import is_part, is_shard, share_overflow, widest
from xamp.distributed.wrappers import Wrappers, groups_of_meshes, groups_sharing
from xamp.errors import PolicyError, StateError
from xamp.policy import Policy
from xamp.torch_compat.torch_private.distributed import process_group_store, process_groups

__all__ = ["RankSettings", "ScalerSettings", "SessionSettings", "first_word"]

_OF_THE_SCALE = (
    *("enabled", "level", "dynamic", "static_scale", "checks", "num_losses", "init_scale", "growth_factor"),
    *("backoff_factor", "growth_interval", "min_loss_scale", "max_loss_scale", "loss_scale"),
)
"""The settings that ranks must share that only decide together. The stages of a pipeline differ in the others."""

_ALONE = "alone"  # the name under which ranks meet that only decide together, whatever their models are
_AVERAGES = "_averages"  # published and not compared: whether DDP averages all gradients of this rank's step
_READS = 3  # how often a rank reads the settings of those for which it does not wait

_rounds: collections.Counter[tuple[str, str]] = collections.Counter()  # sessions so far, by group and name


def first_word(name: str, own: str) -> str:
    """Return one word for all ranks of the job: the ``own`` of the first that asks for ``name``. Waits for none."""
    store = process_group_store(dist.group.WORLD)
    try:
        return bytes(store.compare_set(f"xamp/{name}", "", own)).decode()
    except (RuntimeError, NotImplementedError):  # a store that cannot: of the backends mpi and fake
        return own


class _Meeting:
    """The place in the store of ``group`` where its ranks write settings. Making it writes those of this rank.

    ``name`` tells the sessions of a rank apart: the first under a name on one rank meets the first on another, and so
    on. ``compared`` are the names of the settings that must be equal.
    """

    def __init__(self, group: Any, name: str, settings: Mapping[str, str], compared: Sequence[str]) -> None:
        _rounds[(group.group_name, name)] += 1
        key = f"xamp/{name}/{_rounds[(group.group_name, name)]}"
        self.store: Any = process_group_store(group)
        self.keys = {rank: f"{key}/{rank}" for rank in dist.get_process_group_ranks(group)}
        self.compared = compared
        self.reads = 0
        self.store.set(self.keys[dist.get_rank()], json.dumps(settings))

    def missing(self) -> list[int]:
        """Return the ranks that have not written."""
        return [rank for rank, key in self.keys.items() if not self.store.check([key])]

    def read(self) -> dict[int, dict[str, str]]:
        """Return the settings that each rank has written, by rank. Once all have, nothing is left to read."""
        found = {rank: self.store.get(key) for rank, key in self.keys.items() if self.store.check([key])}
        complete = all(found.values()) and len(found) == len(self.keys)
        self.reads = _READS if complete else self.reads + 1
        return {rank: json.loads(written) for rank, written in found.items() if written}


class RankSettings:
    """Compares the settings of one session with those of the other ranks.

    Attributes:
        is_compared: nothing is left to compare, as long as no wrapper appears.
        heard: names and values of all settings that ranks have published.
    """

    said = ""
    cure = ""

    def __init__(self) -> None:
        self.is_compared = False
        self.heard: set[tuple[str, str]] = set()
        self._met: set[tuple[str, str]] = set()
        self._open: list[_Meeting] = []

    def meet(
        self, named: Iterable[tuple[Any, str]], settings: Mapping[str, str], compared: Sequence[str], *, waits: bool
    ) -> None:
        """Write ``settings`` into the stores of process groups, and compare those in ``compared`` with the other ranks.

        Args:
            named: process groups (None: the default group), each with the name to meet under. Those where the session
                has met under this name are left out.
            settings: names and values.
            compared: names.
            waits: wait for all ranks.

        Raises:
            PolicyError: a rank has other settings. The message names ranks and settings.
            StateError: some have not come within the store's timeout, which ``init_process_group`` was given.
        """
        new = self._write(named, settings, compared)
        self._open += new
        for meeting in new if waits else ():
            self._wait(meeting)
        self.compare_again()

    def publish(self, named: Iterable[tuple[Any, str]], settings: Mapping[str, str]) -> None:
        """Write ``settings`` for others to read, and compare nothing. See :meth:`meet`."""
        self._write(named, settings, ())
        self.is_compared = not self._open

    def compare_again(self) -> None:
        """Compare again where some rank had not written yet."""
        for meeting in self._open:
            self._compare(meeting)
        self._open = [meeting for meeting in self._open if meeting.reads < _READS]
        self.is_compared = not self._open

    def _write(
        self, named: Iterable[tuple[Any, str]], settings: Mapping[str, str], compared: Sequence[str]
    ) -> list[_Meeting]:
        new = []
        group: Any
        for group, name in named:
            group = dist.group.WORLD if group is None else group
            if (group.group_name, name) not in self._met:
                self._met.add((group.group_name, name))
                new.append(_Meeting(group, name, settings, compared))
        return new

    def _wait(self, meeting: _Meeting) -> None:
        try:
            meeting.store.wait([*meeting.keys.values()])
        except RuntimeError as error:
            self._compare(meeting)  # one that differs may have ended for that
            raise StateError(
                f"scale_loss: {_listed(meeting.missing())} did not come to a scale_loss of this model, and the wrapper "
                f"around it or process_group= says that all ranks share it: {str(error).splitlines()[0]}. Look into "
                "the log of the missing, and call xamp.scale_loss in the same steps on every rank of the group."
            ) from error

    def _compare(self, meeting: _Meeting) -> None:
        known = meeting.read()
        self.heard.update(pair for written in known.values() for pair in written.items())
        values = {name: {rank: own.get(name, "") for rank, own in known.items()} for name in meeting.compared}
        different = {name: found for name, found in values.items() if len(set(found.values())) > 1}
        for first in ("enabled", "level"):  # which decide on many others
            if first in different:
                different = {first: different[first]}
        if different:
            raise PolicyError(
                f"{self.said}{_listed_settings(different)}. Their gradients would not add up, and "
                f"their weights drift apart. {self.cure}"
            )


class SessionSettings(RankSettings):
    """The settings of an ``initialize``. ``wrappers`` find the ranks that hold its parameters."""

    said = "scale_loss: ranks that share a model were given different settings: "
    cure = (
        "Give initialize the same arguments and the same checkpoint on every rank, or process_group=, the ranks that "
        "decide together. Call scale_loss of several sessions in one order on every rank."
    )

    def __init__(self, wrappers: Wrappers, policy: Policy, enabled: bool) -> None:
        super().__init__()
        self._wrappers = wrappers
        self._policy = policy
        self._enabled = enabled
        self._names: dict[str, str] = {}  # by name of a process group

    def compare(self, scales: Iterable[float], params: Sequence[torch.Tensor]) -> None:
        """Compare policy and loss scales of the ranks that hold ``params``. See :meth:`RankSettings.meet`."""
        policy, wrappers, given = self._policy, self._wrappers, self._wrappers.group
        rows = {field.name: str(getattr(policy, field.name)) for field in dataclasses.fields(policy)}
        settings = {"enabled": str(self._enabled), **rows, "loss_scale": ", ".join(f"{scale:g}" for scale in scales)}
        all_of_them = tuple(settings)
        holders, is_whole = wrappers.holders(params), not wrappers.may_be_left(params)
        self.compare_again()
        if holders:
            settings[_AVERAGES] = str(wrappers.quorum(params).averages())
            self.meet(self._named(widest(holders), params, ()), settings, all_of_them, waits=is_whole)
            wrappers.agree_always |= (_AVERAGES, "False") in self.heard
        elif not policy.manages_gradients:  # nothing is shared, or by a DDP that this rank does not see
            unseen = [] if self._enabled else search(params)
            self.publish(self._named(process_groups(), params, unseen), settings)
        if given is not None:  # these ranks were said to decide together
            alone = [(group, _ALONE) for group in widest([given])]
            self.meet(alone, settings, _OF_THE_SCALE, waits=policy.checks and is_whole)
        elif not self._enabled:
            self.publish([(None, _ALONE)], settings)
        elif policy.checks and not holders:  # some ranks may never come
            self.meet([(group, _ALONE) for group in widest([None])], settings, _OF_THE_SCALE, waits=False)

    def _named(self, groups: Sequence[Any], params: Sequence[torch.Tensor], unseen: Sequence[Any]) -> list[Any]:
        """Return ``groups``, each with the name under which sessions of these parameters meet."""
        for group in groups:
            names = self._wrappers.names_within(group, params, unseen)
            self._names.setdefault(group.group_name, hashlib.sha256(",".join(names).encode()).hexdigest()[:16])
        return [(group, self._names[group.group_name]) for group in groups]


class ScalerSettings(RankSettings):
    """The settings of a :class:`xamp.GradScaler`. It waits for nobody, for nothing tells which ranks have one.

    Two are compared whose first optimizers have parameters of the same shapes.
    """

    said = "GradScaler: ranks that decide together were given different settings: "
    cure = (
        "Give GradScaler the same arguments and the same state on every rank, or set its process_group, the ranks that "
        "decide together."
    )

    def __init__(self) -> None:
        super().__init__()
        self._sharing: Sequence[Any] | None = None  # process groups, found at the first check

    def compare(self, group: Any, params: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> None:
        """Compare with the scalers of the ranks in ``group``, or else of those that share ``params``.

        See :meth:`RankSettings.meet`. Ranks that share none may have any.
        """
        texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in settings.items()}
        self.meet(self._named(self._groups(group, params), params), texts, tuple(texts), waits=False)

    def publish_disabled(self, group: Any, params: Sequence[torch.Tensor]) -> None:
        """Write for the others that this rank's scaler is switched off."""
        self.publish(self._named(self._groups(group, params), params), {"enabled": "False"})

    def _groups(self, group: Any, params: Sequence[torch.Tensor]) -> Sequence[Any]:
        if self._sharing is None:
            self._sharing = [group] if group is not None else groups_sharing(params)
        return self._sharing

    def share(self, flag: torch.Tensor, group: Any, params: Sequence[torch.Tensor], saturates: bool) -> None:
        """Raise ``flag`` where a rank that decides with this one has found an inf.

        These are the ranks that share sharded parameters, and on a chip that saturates those of ``group``.
        """
        in_parts = any(map(is_part, params))
        found = list(self._sharing or ()) if in_parts else []  # DDPs beside the sharded parameters are among these
        if group is not None or saturates or any(map(is_shard, params)):
            found = [group, *found]
        if in_parts:
            found += groups_of_meshes(params)
        for each in widest(found) if found else ():
            share_overflow(flag, each)

    @staticmethod
    def _named(groups: Iterable[Any], params: Iterable[torch.Tensor]) -> list[tuple[Any, str]]:
        shapes = repr([tuple(param.shape) for param in params])
        name = f"GradScaler/{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"
        return [(group, name) for group in groups]


def _listed_settings(different: Mapping[str, Mapping[int, str]]) -> str:
    """Return the settings that differ, by value and rank: ``level O1 on rank 0 and O4 on ranks 1 and 2``."""
    parts = []
    for name, values in different.items():
        holders: dict[str, list[int]] = {}
        for rank, value in values.items():
            holders.setdefault(value, []).append(rank)
        parts.append(f"{name} " + " and ".join(f"{value} on {_listed(ranks)}" for value, ranks in holders.items()))
    return "; ".join(parts)


def _listed(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 3, 4, 5``; of many the first eight."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(map(str, ranks[:8])) + more
