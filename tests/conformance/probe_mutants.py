"""Broken backends and devices for the clauses of tier ``probe``."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from mutants import Mutant, also, patched, registered
from torch.utils._python_dispatch import TorchDispatchMode

from xamp.backends.cpu import CpuBackend
from xamp.contract import Capabilities
from xamp.policy import LEVELS
from xamp.registry.registry import Registry
from xamp.sessions import checks, initialize
from xamp.sessions.session import Session


class Untried(CpuBackend):
    """Its probe would find such faults before any clause does."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        return ""


class SeesNoOverflow(Untried):
    """Multiplies and never looks."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)


class LooksAtTheFirst(Untried):
    """Looks at the first gradient only, and there at the first value."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)
        if not grads[0].flatten()[0].isfinite():
            found_inf.fill_(1.0)


class Divides(Untried):
    """Takes the inverse for the scale."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        super().unscale_(grads, found_inf, 1 / inv_scale)


class LowersTheFlag(Untried):
    """Writes what it found over what stood there."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        found_inf.zero_()
        super().unscale_(grads, found_inf, inv_scale)


class ForgetsTheFlag(Untried):
    """A chip whose flag goes down when it is read: what is asked second is told that nothing happened."""

    flag = False

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(overflow="flag")

    def clear_overflow(self, device: torch.device) -> None:
        self.flag = False

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        if self.flag:
            found_inf.fill_(1.0)
        self.flag = False
        for grad in grads:
            grad.mul_(inv_scale)

    def make_overflow_(self, grad: torch.Tensor) -> None:
        self.flag = True


class ClaimsFusedRprop(CpuBackend):
    """Declares a fused optimizer that torch does not have."""

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(fused_optimizers=("Rprop",))


class RunsTwoLevels(CpuBackend):
    """Declares O0 and O1."""

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(levels=("O0", "O1"), dtypes=("float16",))


class IsFastInBf16(CpuBackend):
    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(fast_dtypes=("bfloat16",))


class HasNoDevices(CpuBackend):
    def devices(self) -> Sequence[str]:
        return ()


class CountsTwice(CpuBackend):
    """Lists a device more than its runtime has."""

    def devices(self) -> Sequence[str]:
        return ("one", "one again")


class DrawsNumbers(CpuBackend):
    """Tries random matrices."""

    def probe(self) -> None:
        torch.rand(3)


class _Device(TorchDispatchMode):
    """A device on which some operator does something else."""

    def __init__(self, *names: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        return self.run(func, args, kwargs or {}) if name in self._names else func(*args, **(kwargs or {}))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError


class _Coarse(_Device):
    """Multiplies fp32 matrices in bf16."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if args[0].dtype != torch.float32:
            return func(*args, **kwargs)
        return func(*(arg.bfloat16() for arg in args), **kwargs).float()


class _Saturating(_Device):
    """Gives the largest number where inf is due."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        return made.nan_to_num() if made.dtype in (torch.float16, torch.bfloat16) else made


class _Unseeded(_Device):
    """Has a generator that nobody seeds."""

    generator = torch.Generator()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs).uniform_(generator=self.generator)


@contextlib.contextmanager
def _with_stale_ledger() -> Iterator[None]:
    entry = {"clause": "probe.no_such_clause", "reason": "it was renamed", "link": "https://example.org"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.json")
        path.write_text(json.dumps([entry]), encoding="utf-8")
        with registered("xamp.backends.cpu:CpuBackend", ledger=str(path))():
            yield


def _mutant(name: str, clause: str, cls: type) -> Mutant:
    return Mutant(name, f"probe.{clause}", registered(f"{__name__}:{cls.__name__}"), "mutant")


_SECOND = property(lambda _: torch.device("meta"))
_started: list[Any] = []

MUTANTS = [
    Mutant("says another device than the model's", "probe.device_string", patched(Session, "device", _SECOND)),
    _mutant("has no devices", "report", HasNoDevices),
    _mutant("claims a fused Rprop", "declarations", ClaimsFusedRprop),
    Mutant("multiplies fp32 in bf16", "probe.product", lambda: _Coarse("mm")),
    Mutant("saturates and declares inf", "probe.inf_stays", lambda: _Saturating("mul", "div")),
    _mutant("never reports inf", "overflow_is_found", SeesNoOverflow),
    _mutant("looks at the first value", "one_value_is_enough", LooksAtTheFirst),
    _mutant("divides by the inverse scale", "unscale_multiplies", Divides),
    _mutant("lowers the flag", "flag_is_only_raised", LowersTheFlag),
    _mutant("forgets the flag when it is read", "flag_is_asked_alone", ForgetsTheFlag),
    Mutant(
        "takes levels that are not declared",
        "probe.undeclared_level_is_refused",
        also(registered(f"{__name__}:RunsTwoLevels"), patched(checks, "check_capabilities", lambda *_: None)),
        "mutant",
    ),
    Mutant(
        "takes O1 for auto",
        "probe.auto_is_declared",
        also(registered(f"{__name__}:IsFastInBf16"), patched(initialize, "best_level", lambda *_: LEVELS["O1"])),
        "mutant",
    ),
    _mutant("lists a device twice", "runtime", CountsTwice),
    Mutant("cannot be seeded", "probe.seed", lambda: _Unseeded("rand")),
    _mutant("draws numbers when probed", "probing_draws_no_numbers", DrawsNumbers),
    Mutant("a ledger names a clause that is gone", "probe.ledger", _with_stale_ledger, "mutant"),
    Mutant(
        "is another object each time",
        "probe.registered",
        patched(Registry, "resolve", lambda self, name, kind: type(self.best_for(kind))(self.best_for(kind).spec)),
    ),
]
