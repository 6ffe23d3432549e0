"""The common base of all tiers: a clause's lane and its name, the ledger, and a guard on torch's global state.

Clauses choose levels by the rows of :data:`xamp.policy.LEVELS`. Only a clause about one level names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from xamp.policy import LEVELS, Level, levels_where
from xamp.testing.lane import Lane, in_full_fp32, open_lane
from xamp.testing.ledger import Ledger, read_ledger

__all__ = ["Tier", "at_levels", "casting", "clause_of", "every_level", "managed", "scaled"]


def at_levels(condition: Callable[[Level], bool]) -> pytest.MarkDecorator:
    """The clause runs at each level for whose row ``condition`` is true."""
    return pytest.mark.parametrize("level", levels_where(condition))


every_level = pytest.mark.parametrize("level", LEVELS)
casting = at_levels(lambda row: row.casts_operators)
scaled = at_levels(lambda row: row.dynamic)
managed = at_levels(lambda row: row.manages_gradients)


def clause_of(item: Any) -> str:
    """The clause name of a pytest item: ``"probe.seed"``, ``"operators.result_dtype[mm-float16]"``."""
    return _named(item.cls, item.originalname, item.name)


def clause_without_parameters(kind: type, function: str) -> str:
    """The name of the clause that the method ``function`` of ``kind`` is: ``"operators.result_dtype"``."""
    return _named(kind, function, function)


def _named(kind: type, function: str, name: str) -> str:
    *_, owner = (base for base in kind.__mro__ if function in vars(base))
    return f"{owner.tier}.{name.removeprefix('test_')}"  # type: ignore[attr-defined]


class Tier:
    """Base of the tiers.

    Attributes:
        tier: The tier's name; several classes may belong to one tier.
        backend: Name of the backend on trial; ``"auto"``: the best one for ``device``.
        device: The device, such as ``"cuda:1"``; empty: the first device type that the backend serves.
        require: Capabilities whose absence is a failure; see :data:`xamp.testing.CAPABILITIES`.
        ledger: Known gaps: a path, or ``"package:file"``. Empty: the ledger that the backend's spec names.
    """

    tier: ClassVar[str] = ""
    backend: ClassVar[str] = "auto"
    device: ClassVar[str] = ""
    require: ClassVar[tuple[str, ...]] = ()
    ledger: ClassVar[str] = ""

    @pytest.fixture
    def lane(self, monkeypatch: pytest.MonkeyPatch) -> Lane:
        """The device and backend on trial; the environment makes xamp use them, also in child processes."""
        if not __debug__:
            pytest.fail("Python runs with -O, which takes the checks out: run it without", pytrace=False)
        lane = open_lane(self.backend, self.device, self.require)
        monkeypatch.setenv("XAMP_BACKEND", str(lane))
        monkeypatch.setenv("XAMP_DEVICE", str(lane.device))
        return lane

    @pytest.fixture(autouse=True)
    def _known_gap(self, lane: Lane, request: pytest.FixtureRequest) -> None:
        """Expect the clause to fail if the ledger names it."""
        entry = _ledger(self.ledger or lane.backend.spec.ledger).on(lane.device_name).of(clause_of(request.node))
        if entry is not None:
            reason = f"{entry.reason} ({entry.link})"
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture(autouse=True)
    def _full_fp32(self, lane: Lane) -> Iterator[None]:
        """Compute float32 in all digits."""
        with in_full_fp32(lane):
            yield

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Compute with one thread of the host.

        A second thread makes kernels this small slower, a hundredfold on a busy machine. If several threads share a
        sum, its last bits change from run to run.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.fixture(autouse=True)
    def _nothing_left_behind(self, lane: Lane) -> Iterator[None]:
        """Seed torch, and fail a clause that leaves torch's global state changed."""
        torch.manual_seed(0)
        before = _state(lane.kind)
        yield
        now = _state(lane.kind)
        _restore(before, lane.kind)
        changed = {name: (before[name], now[name]) for name in before if now[name] != before[name]}
        if changed:
            pytest.fail(f"the clause left torch's state changed, before and after: {changed}", pytrace=False)


def _state(kind: str) -> dict[str, Any]:
    """The settings of torch in this thread that change what other code computes."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
    }
    for each in {"cpu", kind}:
        state[f"autocast {each}"] = torch.is_autocast_enabled(each)
        state[f"autocast dtype {each}"] = torch.get_autocast_dtype(each)
    return state


def _restore(state: dict[str, Any], kind: str) -> None:
    """Restore torch's settings, so that a clause's fault does not affect the next clause."""
    torch.set_default_dtype(state["default dtype"])
    torch.set_grad_enabled(state["gradients"])
    torch.set_autocast_cache_enabled(state["autocast cache"])
    for each in {"cpu", kind}:
        torch.set_autocast_enabled(each, state[f"autocast {each}"])
        torch.set_autocast_dtype(each, state[f"autocast dtype {each}"])


@functools.cache
def _ledger(place: str) -> Ledger:
    return read_ledger(place)
