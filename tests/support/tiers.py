"""Which tests run when: ``--tier=quick``, ``usual`` or ``slow``. tests/README.md has what stands where.

The quick tier has what costs.py calls quick among the tests in :data:`ROOMS`, on the CPU. The usual one has the suite
on every device of the machine besides, and two processes that train together. The slow one is all but the quick one,
so that both together are all tests, but for the thorough ones. Without ``--tier`` nothing is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import costs
import pytest

from xamp.registry.registry import HOST

__all__ = ["NAMES", "ROOMS", "Tiers"]

NAMES = ("quick", "usual", "slow")
ROOMS = ("tests/unit/", "tests/conformance/")
PROVES = ("tests/conformance/test_conformance.py", "tests/distributed/test_ddp.py", "tests/distributed/test_decide.py")
"""What the usual tier runs besides: whether this machine's devices, and two processes on it, do as they should."""


class Tiers:
    """A plugin of pytest: it takes out what is not in the tier, meters the rest, and says at the end what it did.

    Args:
        tier: one of :data:`NAMES`; empty: nothing is taken out.
        known: what tests take.
        keep: what this run took is written into this file.
    """

    def __init__(self, tier: str, known: costs.Costs, keep: Path | None = None) -> None:
        self._tier = tier
        self._keep = keep
        self._costs = known
        self._meter = costs.Meter()
        self._left: Counter[str] = Counter()  # cases by test, of those that were taken out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take out what is not in the tier; where workers share the rest, begin with the files that take longest."""
        out = [item for item in items if not self._takes(item)]
        if out:
            config.hook.pytest_deselected(items=out)
            left = {*out}
            items[:] = [item for item in items if item not in left]
            self._left.update(item.nodeid.partition("[")[0] for item in out)
        if hasattr(config, "workerinput"):
            sums: dict[str, float] = defaultdict(float)
            for item in items:
                sums[item.nodeid.partition("::")[0]] += self._costs.of(item.nodeid)
            items.sort(key=lambda item: -sums[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Meter."""
        self._meter.pytest_runtest_logreport(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the process that shares the work out what was taken out, or keep the costs."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self._left)
        elif self._keep:
            self._costs.with_measured(self._meter.seconds).write(self._keep)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear it: each worker has taken out the same."""
        self._left = Counter(getattr(node, "workeroutput", {}).get("left_out", {})) or self._left

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out, and what the rest took."""
        if self._tier or self._keep:
            for line in (*self._meter.lines(), *self._what_was_left_out()):
                terminalreporter.write_line(line)

    def _takes(self, item: pytest.Item) -> bool:
        quick = item.nodeid.startswith(ROOMS) and _is_on_host(item) and not self._costs.is_slow(item.nodeid)
        if self._tier == "slow":
            return not quick
        return not self._tier or quick or (self._tier == "usual" and item.nodeid.startswith(PROVES))

    def _what_was_left_out(self) -> Iterator[str]:
        if self._tier in ("quick", "usual"):
            seconds = sum(self._costs.of(test) * cases for test, cases in self._left.items())
            yield f"left out: {self._left.total()} cases of {len(self._left)} tests, which take about {seconds:.0f} s"


def _is_on_host(item: pytest.Item) -> bool:
    """Whether a test's lane, if it has one, is the CPU."""
    chosen = item.callspec.params.get("lane") if hasattr(item, "callspec") else None
    own = getattr(getattr(item, "cls", None), "backend", HOST)  # a class of the conformance suite
    return getattr(chosen, "kind", HOST) == own == HOST
