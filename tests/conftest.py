"""Lanes for the tests marked ``device``, counts of emulated cards, and a guard that no test leaves something behind.

A test that is made for each level, or for each lower dtype, is skipped for those that the lane's backend lacks.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compiling
import costs
import drawing
import fatal_tests
import interpreting
import measuring
import pytest
import tiers
import torch
import torch_warnings
import version_ledger
from emulated_cards import counts
from lanes import Lane, lacks_dtype, usable_lanes
from torch.utils.weak import WeakIdKeyDictionary

import xamp
from xamp.casting import active
from xamp.policy import LEVELS
from xamp.registry.device_in_use import DEVICE_VARIABLE
from xamp.registry.registry import HOST
from xamp.testing import Conformance
from xamp.testing.lane import in_full_fp32
from xamp.torch_compat import kernels

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a test imports Triton: its kernels run on the CPU

_UNCOVERED = (
    *("conformance/test_standin", "conformance/test_outside", "conformance/test_other_devices"),
    "conformance/test_backends_page",
    *("conformance/test_added_level", "faults/", "emulated/test_failures", "emulated/test_command"),
    *("unit/casting/test_op_docs", "unit/casting/test_op_policy_breaks", "unit/port/test_port_scripts"),
    *("unit/doctor/test_doctor_plugins", "unit/doctor/test_doctor_torch", "unit/apex/test_apex_messages"),
    *("emulated/test_apex_scripts", "emulated/test_ports", "distributed/test_ended"),
    # These train for long, compile, or draw many cases.
    *("conformance/test_numerics", "unit/scaling/test_step_breaks"),
    "unit/scaling/test_followers.py::test_a_forward_in_a_larger_graph",
    "unit/port/test_port_meaning.py::test_many",
)
"""Files, and tests, that start many processes or take long otherwise, and reach no line that others do not.

Each process that measures its coverage starts seconds later.
"""
_COVERED = (
    *("unit/port/test_port_rules", "unit/port/test_port_files", "unit/port/test_port_doubt"),
    "unit/port/test_port_meaning.py::test_each_shape",
)
"""Files, and tests, each of whose many short cases reaches lines of its own."""
_COVERED_CASES = 4
"""Of a test with many cases, this many are measured, from first to last: the others reach the same lines.

What is measured takes about twice its time.
"""


_LEDGER: pytest.StashKey[list[version_ledger.Entry]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xamp")
    group.addoption("--device", action="append", default=[], help="run device tests on this lane only (repeatable)")
    group.addoption("--require", action="append", default=[], help="fail unless this lane is there (repeatable)")
    group.addoption("--all", action="store_true", help="run the tests marked thorough, in place of their samples")
    group.addoption("--tier", choices=tiers.NAMES, default="", help="run this part of the tests (see tiers.py)")
    group.addoption("--costs", action="store_true", help="write what the tests took into tests/costs.tsv")
    group.addoption("--draw", type=int, metavar="N", help="run at most N cases of a test (see drawing.py)")


def pytest_configure(config: pytest.Config) -> None:
    # Of a test without a lane, of fixtures that many tests share and of the processes they start: whatever is in this
    # machine makes no difference to them. Under an emulation its card is meant.
    if not os.environ.get("XAMP_EMULATED_SOC"):
        os.environ[DEVICE_VARIABLE] = HOST
    # A shell that runs this in the background has SIGINT ignored here, and in all processes that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    drawing.seed()  # before processes start that share the tests
    interpreting.install()
    config.stash[_LEDGER] = version_ledger.read()
    keep = costs.TABLE if config.getoption("--costs") else None
    config.pluginmanager.register(tiers.Tiers(config.getoption("--tier"), costs.read(), keep))
    if hasattr(config, "workerinput"):  # one of several processes that share the machine: so do their threads
        # Two coverages run in a worker before pytest-cov starts its own, and nothing is kept of what they record. In a
        # test marked no_cover pytest-cov stops only its own.
        measuring.stop_here()
        threads = max(1, torch.get_num_threads() // int(config.workerinput["workercount"]))
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of its children
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else it starts processes that compile


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"torch {torch.__version__}", f"XAMP_TEST_SEED={drawing.seed()} draws cases of tests that have many"]
    for report in xamp.available_backends():
        state = "usable: " + ", ".join(report.devices) if report.usable else f"not usable: {report.reason}"
        lines.append(f"lane {report.name}: {state}")
    return lines


def _lanes(config: pytest.Config) -> list[Lane]:
    lanes = usable_lanes()
    names = {str(lane) for lane in lanes}
    missing = [name for name in (*config.getoption("--require"), *config.getoption("--device")) if name not in names]
    if missing:
        raise pytest.UsageError(f"lanes asked for and not usable: {', '.join(missing)} (usable: {', '.join(names)})")
    chosen = config.getoption("--device")
    return [lane for lane in lanes if not chosen or str(lane) in chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lane" in metafunc.fixturenames and not _suite_of(metafunc.cls):
        metafunc.parametrize("lane", _lanes(metafunc.config), ids=str)


def _suite_of(cls: type | None) -> str:
    """The backend on which a class of the conformance suite runs, which has a lane of its own; empty for others."""
    return str(cls.backend) if cls is not None and issubclass(cls, Conformance) else ""


def _not_measured(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        # What the compiler traces is not measured, and the compiler takes twice its time.
        if name.startswith(_UNCOVERED) or "compil" in name:
            yield item
        elif not name.startswith(_COVERED):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        measured = {round(k * (len(same) - 1) / (_COVERED_CASES - 1)) for k in range(_COVERED_CASES)}
        yield from (item for place, item in enumerate(same) if place not in measured)


def _lacks(item: pytest.Item) -> str:
    """Why the lane of a test cannot run it; empty if it can."""
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    lane = chosen.get("lane")
    if lane is None:
        return ""
    for value in chosen.values():
        level = re.split("[- ]", value)[0] if isinstance(value, str) else ""  # as in "O2-second-fp32", "O1 static"
        if level in LEVELS and level not in lane.can.levels:
            return f"{lane} cannot run {level}"
        if (value is torch.float16 or value is torch.bfloat16) and (reason := lacks_dtype(lane, value)):
            return reason
    return ""


@pytest.hookimpl(tryfirst=True)  # before -k and -m take out what the ledger names
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes = config.getoption("--device")  # then tests of other lanes are not there
    items += version_ledger.hold(session, items, config.stash[_LEDGER], in_part=bool(lanes))
    for item in items:
        if "lane" in getattr(item, "fixturenames", ()):
            item.add_marker("device")
    if config.pluginmanager.hasplugin("_cov"):
        for item in _not_measured(items):
            item.add_marker("no_cover")
    marker = "sample" if config.getoption("--all") else "thorough"
    left = {item for item in items if item.get_closest_marker(marker)}
    if lanes:
        left |= {item for item in items if _suite_of(getattr(item, "cls", None)) not in ("", *lanes)}
    most = config.getoption("--draw")
    if most or not config.getoption("--all"):
        left.update(drawing.left_out((item for item in items if item not in left and not _lacks(item)), most))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    fatal_tests.find(items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return fatal_tests.run_alone(pyfuncitem) or None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["emulated"] = {chip: dict(found) for chip, found in counts.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for chip, found in getattr(node, "workeroutput", {}).get("emulated", {}).items():
        counts.setdefault(chip, Counter()).update(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for chip, found in sorted(counts.items()):
        numbers = ", ".join(f"{number} {outcome}" for outcome, number in found.items() if number)
        terminalreporter.write_line(f"emulated {chip}: {numbers}")


@pytest.fixture(autouse=True, scope="module")
def _the_compiler_logs_less() -> None:
    """For each file, because one before may have imported the compiler."""
    compiling.log_less()


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """The collector need not look at what stays: the tests, what is imported, what torch keeps.

    They are 480,000 objects at first, of which a full collection takes 0.25 s, and 1,300,000 after the tests that
    compile. A look for a DDP around a model walks through them too, and some tests ask for several of either.
    """
    if "torch._dynamo" in sys.modules:
        compiling.forget()  # else what its cache holds would outlive the cache, where it lies in a cycle
    with torch_warnings.of_fsdp1():
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _what_the_lane_can(request: pytest.FixtureRequest) -> None:
    """Skip what is made for a level or a lower dtype that the lane does not have, whichever argument names it."""
    if reason := _lacks(request.node):
        pytest.skip(reason)


def _lane_of(request: pytest.FixtureRequest) -> Lane | None:
    chosen = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    lane = chosen.get("lane")
    return lane if isinstance(lane, Lane) else None


@pytest.fixture(autouse=True)
def _the_lane_is_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device in use is the lane's, and never one that is better: without a lane it is the CPU (see above)."""
    if lane := _lane_of(request):
        monkeypatch.setenv(DEVICE_VARIABLE, str(lane.device))


@pytest.fixture(autouse=True)
def _gaps_that_a_test_makes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """And formats that its backend registers; those of the devices that are here were found with the lanes."""
    monkeypatch.setattr(kernels, "_missing", {**kernels._missing})
    monkeypatch.setattr(kernels, "_formats", {**kernels._formats})


@pytest.fixture(autouse=True)
def _regions_that_a_test_leaves_open_are_forgotten() -> Iterator[None]:
    """torch counts them for a thread; a compiled region that raised leaves the count up."""
    yield
    for _ in range(torch.autocast_increment_nesting()):
        torch.autocast_decrement_nesting()


@pytest.fixture(autouse=True)
def _lane_in_full_fp32(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is compared with float32 on a CPU is computed in float32, not in what a card makes of it by default."""
    lane = _lane_of(request)
    if lane is None or lane.kind == HOST:
        yield
        return
    with in_full_fp32(lane):
        yield


@pytest.fixture(autouse=True)
def _children_are_as_their_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the coverage of a test is not measured, that of the processes it starts is not either, but for ranks."""
    if request.node.get_closest_marker("no_cover"):
        for name in measuring.told():
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def _inductor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: what inductor finds out of the C++ compiler, and the headers that it compiles, take 10 seconds."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def inductor_cache(_inductor_folder: Path) -> Iterator[None]:
    """Not the machine's: an entry that an earlier version of xamp left there, with stale casts, was found again."""
    with compiling.files_in(_inductor_folder):
        yield


@pytest.fixture
def no_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls that mean the only live session: those that earlier tests may have left do not count."""
    monkeypatch.setattr("xamp.sessions.session._sessions", WeakIdKeyDictionary())


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Seed; and fail a test after which autocast, the default dtype or a session is other than before."""
    torch.manual_seed(0)
    before = (torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled())
    yield
    assert (torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()) == before
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
    assert active.snapshot() == (None, None), "a region was left open"
