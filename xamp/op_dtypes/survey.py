"""Finds the result dtypes of each overload of the table on a device under an op policy, even if the device is absent.

First the device's own list is observed (:mod:`xamp.op_dtypes.observe`). Under the portable policy, a present device
is observed again, in a region with xamp's entries. For an absent device, the results of xamp's entries are computed
from the table. This is for display and comparison; training never uses it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

import torch

from xamp.casting import active
from xamp.casting.ops import UNKNOWN, fixed_dtype
from xamp.casting.ops.parts import HERE, autocast_key
from xamp.casting.ops.portable import SAME, additions, install
from xamp.casting.ops.table import RULES, Kind, Rule
from xamp.casting.region_mark import mark_of
from xamp.op_dtypes.observe import Observed, attempt, expected, is_present
from xamp.op_dtypes.samples import Sample, samples
from xamp.torch_compat.torch_private import dispatch

__all__ = ["Row", "Survey", "own_list", "survey"]

Results = dict[str, "str | None"]

_NO_KERNEL = "it has no kernel"
_KEPT = "it keeps its own rule, for want of a kernel that does as the table says"


@dataclasses.dataclass(frozen=True)
class Row:
    """One overload on one device.

    Attributes:
        overload: Its name in the table.
        rule: The rule of the table.
        reason: The reason for that rule.
        registered: Whether the device's own list has the overload.
        native: The device's own rule as observed: a kind of rule, ``"other"``, ``"unknown"``, or ``"none"`` if the list
            does not have the overload. The dtype to which the device casts whatever that of the region, if it does.
        added: The rule for which xamp registers an entry; None if it adds none.
        results: The dtypes of the floating results, by the dtypes of the floating inputs: ``"fp32"``, ``"lower"``,
            ``"mixed"`` (both, in either order), ``"named"`` (lower, and the caller passes the lower dtype as
            ``dtype``). Several dtypes are joined by ``"/"``. ``"error"``: the call is refused. ``"unknown"``: it could
            not be observed. None: there is no such call.
        source: Where the results are from. ``"called"``: calls on the device. ``"fake"``: calls on fake tensors.
            ``"table"``: computed from the table. ``"unknown"``: there are no results.
        agrees: Whether the results are those of the table; None if nothing was observed or the device has no kernel.
        cannot: Why xamp cannot make this device follow the table; empty if it can, or need not.
    """

    overload: str
    rule: str
    reason: str
    registered: bool
    native: str
    added: str | None
    results: Results
    source: str
    agrees: bool | None
    cannot: str


@dataclasses.dataclass(frozen=True)
class Survey:
    """One device under one op policy.

    Attributes:
        present: Whether the device is present.
        rows: One for each overload of the table that this torch has, in the table's order.
        device_only: Overloads in the device's own list that are not in the table, in alphabetical order.
    """

    present: bool
    rows: tuple[Row, ...]
    device_only: tuple[str, ...]


def survey(device_type: str, op_rules: Mapping[str, str], dtype: torch.dtype, op_policy: str) -> Survey:
    """Observe or compute the results of each overload of the table that this torch has.

    On a present device, xamp's entries are registered; they do nothing outside of regions.

    Args:
        device_type: The type of the device.
        op_rules: See :attr:`xamp.contract.Backend.op_rules`.
        dtype: The lower dtype.
        op_policy: ``"portable"`` or ``"native"``.

    Raises:
        RuntimeError: torch does not know the device type.
    """
    torch.device(device_type)
    missing = additions(device_type, op_rules)
    listed = own_list(device_type, op_rules)
    present, portable = is_present(device_type), op_policy == "portable"
    if present:
        (install if portable else fixed_dtype.install)(device_type, op_rules)
    entries = {*(missing if portable else ()), *fixed_dtype.fixed(op_rules)}
    surveyor = _Surveyor(device_type, dtype, op_rules, entries, listed, present, portable)
    return Survey(present, tuple(map(surveyor.row, HERE)), tuple(sorted(listed - set(RULES))))


def own_list(device_type: str, op_rules: Mapping[str, str]) -> set[str]:
    """Return the overloads of torch's operators on the device's Autocast key, without xamp's entries."""
    names = dispatch.registrations_for_key(autocast_key(device_type))
    ours = {name for name, native in additions(device_type, op_rules).items() if native is None}
    ours |= fixed_dtype.added(device_type)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")} - ours


@dataclasses.dataclass(frozen=True)
class _Surveyor:
    """Makes the rows of one survey."""

    device_type: str
    dtype: torch.dtype
    op_rules: Mapping[str, str]
    entries: set[str]  # the overloads for which xamp adds an entry
    listed: set[str]
    present: bool
    portable: bool

    def row(self, overload: str) -> Row:
        rule, registered = RULES[overload], overload in self.listed
        seen, absent = self._results(overload)
        native = _kind(overload, seen, self.dtype) if registered else "none"
        if overload in fixed_dtype.fixed(self.op_rules):
            native = self.op_rules[overload]
        # The kernels of an absent device cannot be observed, so what its backend declares is taken.
        same, composite = self.op_rules.get(overload) == SAME, _is_composite(overload)
        absent = absent or (same and not (self.present or registered or composite))
        wanted = _wanted(overload, rule.kind, self.dtype)
        if absent:
            results, source = dict.fromkeys(seen), UNKNOWN
        elif overload in self.entries:
            results, source = self._added(overload, wanted)
        else:
            results, source = self._own(seen, wanted if same and composite else seen)
        agrees = _agrees(results, wanted)
        kept = self.portable and same and agrees is False
        cannot = _NO_KERNEL if absent else _KEPT if kept else ""
        added = rule.kind if overload in self.entries else None
        return Row(overload, rule.kind, rule.reason, registered, native, added, results, source, agrees, cannot)

    def _own(self, seen: Results, otherwise: Results) -> tuple[Results, str]:
        """Return the results without an entry of xamp: those observed, otherwise those known."""
        if UNKNOWN not in seen.values():
            return seen, "called" if self.present else "fake"
        return otherwise, UNKNOWN if UNKNOWN in otherwise.values() else "table"

    def _added(self, overload: str, wanted: Results) -> tuple[Results, str]:
        """Return the results with xamp's entry."""
        if not self.present:
            return wanted, "table"
        leave = active.open_region(mark_of(self.device_type, self.dtype, portable=True), None)
        try:
            return self._results(overload)[0], "called"
        finally:
            leave()

    def _results(self, overload: str) -> tuple[Results, bool]:
        """Return the results in the present autocast state, and whether the device has no kernel for the overload."""
        absent = False

        def call(sample: Sample, given: tuple[torch.dtype, ...]) -> set[str]:
            nonlocal absent
            seen = attempt(sample, self.device_type, self.dtype, given, present=self.present)
            absent |= self.present and seen.unobserved.startswith(f"Could not run 'aten::{overload}'")
            return _names(seen)

        return _table(overload, self.dtype, call), absent


def _table(overload: str, dtype: torch.dtype, ask: Callable[[Sample, tuple[torch.dtype, ...]], set[str]]) -> Results:
    """Return the answers of ``ask`` for the sample calls of ``overload``, by kind of input."""
    plain = [sample for sample in samples(overload) if not sample.names_dtype]
    named = [sample for sample in samples(overload) if sample.names_dtype]
    several = [sample for sample in plain if _floating_inputs(sample) > 1]
    calls: dict[str, list[tuple[Sample, tuple[torch.dtype, ...]]]] = {
        "fp32": [(sample, (torch.float32,)) for sample in plain],
        "lower": [(sample, (dtype,)) for sample in plain],
        "mixed": [(sample, given) for sample in several for given in ((dtype, torch.float32), (torch.float32, dtype))],
        "named": [(sample, (dtype,)) for sample in named],
    }
    found = {name: sorted({result for each in made for result in ask(*each)}) for name, made in calls.items()}
    return {name: UNKNOWN if UNKNOWN in each else "/".join(each) or None for name, each in found.items()}


@functools.cache
def _floating_inputs(sample: Sample) -> int:
    return len(sample.call("cpu", torch.float32, grad=False, values=False).inputs)


def _names(seen: Observed) -> set[str]:
    if seen.unobserved:
        return {UNKNOWN}
    return {"error"} if seen.error is not None else {_name(dtype) for dtype in seen.dtypes}


def _name(dtype: torch.dtype | None) -> str:
    return "error" if dtype is None else str(dtype).removeprefix("torch.")


def _wanted(overload: str, kind: Kind, dtype: torch.dtype) -> Results:
    """Return the results that a rule promises for the sample calls."""

    def promise(sample: Sample, given: tuple[torch.dtype, ...]) -> set[str]:
        return {_name(expected(Rule(kind, ""), given, dtype, given[0] if sample.names_dtype else None))}

    return _table(overload, dtype, promise)


def _agrees(results: Results, wanted: Results) -> bool | None:
    """Tell whether the observed results are the wanted ones; None if nothing was observed."""
    known = [name for name, result in results.items() if result not in (UNKNOWN, None)]
    return all(results[name] == wanted[name] for name in known) if known else None


def _kind(overload: str, seen: Results, dtype: torch.dtype) -> str:
    """Return the kind of rule that explains the observed results."""
    if set(seen.values()) <= {UNKNOWN, None}:
        return UNKNOWN
    return next(_explanations(overload, seen, dtype), "other")


def _explanations(overload: str, seen: Results, dtype: torch.dtype) -> Iterator[str]:
    kind = RULES[overload].kind
    if _agrees(seen, _wanted(overload, kind, dtype)):
        yield kind
    # Under other rules, the result with a named dtype differs between operators.
    unnamed = {**seen, "named": None}
    yield from (each for each in get_args(Kind) if each != kind and _agrees(unnamed, _wanted(overload, each, dtype)))


def _is_composite(overload: str) -> bool:
    """Tell whether the overload is made of other operators, and so runs on every device that has these."""
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(dispatch.has_kernel_for_key(f"aten::{overload}", key) for key in keys)
