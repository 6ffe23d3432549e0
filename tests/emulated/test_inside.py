"""Runs on emulated cards, two at a time: the files in inside/, what torchrun starts, the conformance suite.

Without --all: on one chip what differs there, in xamp. With --all also other chips, the operators that the emulation
computes (marked ``kernels``), the whole of the suite on one chip, its tier on operators under ``--strict``, and the
tests of the project that are marked ``device``, of each a part of the cases. The whole suite and all cases, on every
chip, are what ``ci/device.sh`` runs.

Covers: backends.npu.emulation.*.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import measuring
import pytest
from emulated_cards import CHIPS, INSIDE, counts, emulate, emulated_files, emulated_pytest, last, need_emulation

from xamp.backends.npu import emulation

A2, OLD = CHIPS
MX = "Ascend950DT"
BOTH = (
    *("test_autocast_oracle", "test_attention", "test_backend", "test_chip", "test_device", "test_doctor"),
    *("test_faults", "test_formulas", "test_fp32", "test_fused", "test_limits", "test_losses"),
    *("test_apex_rest", "test_mx", "test_own", "test_scaler_oracle", "test_states", "test_training"),
)
# One process for each chip: to start it takes longer than most of these files. test_autocast_oracle stands first in it:
# what a region registers with torch stays. The operators are the same kernels on every chip, but for what
# test_saturation holds.
TOGETHER = {A2: (*BOTH, "test_operators", "test_unserved"), OLD: (*BOTH, "test_apex_formats", "test_saturation")}
KERNELS = (
    *("test_attention", "test_formulas", "test_limits", "test_losses", "test_operators", "test_records", "test_strict"),
    *("test_mx", "test_unserved", "strict conformance"),
)
"""What tests the emulation, and little of xamp: ``ci/nightly.sh kernels``, and who changes the emulation."""
TIERS = dict.fromkeys((A2, OLD), ("probe", "operators", "levels", "scaling"))
"""What always runs of the conformance suite; the rest on one chip with --all, and on all by ``ci/device.sh``."""
SLOW = [
    *(("device tests", chip) for chip in CHIPS),
    ("whole conformance", A2),
    *((name, chip) for name in ("strict conformance", "ranks_engines") for chip in CHIPS),
    ("test_mx_gpt", MX),
]
# The longest first, so that the two workers end together.
RUNS = [
    *SLOW,
    *((file, chip) for chip, files in TOGETHER.items() for file in files),
    *(("conformance", chip) for chip in reversed(CHIPS)),
    *((file, A2) for file in ("test_processes", "test_records", "test_strict")),
    *((file, chip) for file in ("ranks", "ranks_sharded") for chip in CHIPS),
    *(("test_chip", chip) for chip in ("Ascend910_9391", "Ascend310P3", MX)),
    ("test_mx", MX),
    ("fp8 conformance", MX),
]
NAMES = [f"{file}-{chip}" for file, chip in RUNS]
# The suite's own clauses are in "whole conformance".
DEVICE_TESTS = ("unit", "distributed", "faults", "conformance")
_SUITE = INSIDE.parent.parent / "conformance" / "test_conformance.py"
_NO_FILES = {"conformance", *(name for name, _ in RUNS if " " in name)}
MEASURED = A2
"""Of all this, coverage is measured of what runs together on this chip. The rest reaches few lines more."""


def run(file: str, chip: str) -> None:
    if file.startswith("ranks"):
        run_ranks(file, chip)
    elif file == "conformance":
        run_conformance(chip, *(f"--clause={tier}.*" for tier in TIERS[chip]))
    elif file == "fp8 conformance":
        run_conformance(chip, "--clause=fp8.*", least=4)
    elif file == "whole conformance":
        run_conformance(chip, devices=2, timeout=3000)
    elif file == "strict conformance":  # it gives operators the most dtypes; what is refused shows here first
        run_conformance(chip, "--clause=operators.*", strict=True, least=100)
    elif file == "device tests":
        folders = [INSIDE.parent.parent / name for name in DEVICE_TESTS]
        words = ("-m", "device", "--device", "npu", "--draw=4", f"--ignore={_SUITE}")
        emulated_pytest(chip, *words, *folders, devices=2, timeout=3000)
    else:
        several, strict = 2 if file in ("test_processes", "test_records") else 1, file == "test_strict"
        emulated_pytest(chip, INSIDE / f"{file}.py", devices=several, strict=strict)


def run_ranks(file: str, chip: str) -> None:
    words = ("torchrun", "--standalone", "--nproc-per-node=2", INSIDE / f"{file}.py")
    done = emulate(chip, *words, devices=2, timeout=600)
    ended = {rank: (int(right), int(wrong)) for rank, right, wrong in re.findall(_RANK_ENDED, done.stdout)}
    counts.setdefault(chip, Counter()).update(passed=sum(right for right, _ in ended.values()))
    assert done.returncode == 0, f"on two emulated {chip}:\n{last(done)}"
    assert set(ended) == {"0", "1"}
    assert all(right >= 12 and not wrong for right, wrong in ended.values())


def run_conformance(
    chip: str,
    *words: str,
    devices: int = 1,
    timeout: float = 600,
    strict: bool = False,
    least: int = 300,
) -> None:
    """The suite against the ledger of the backend: exit code 0, nothing that is declared skipped."""
    done = emulate(
        *(chip, "xamp", "conformance", "--device", "npu", *words, "--json", "-"),
        devices=devices,
        timeout=timeout,
        strict=strict,
    )
    report = json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout.startswith("{") else {}
    found = Counter(row["outcome"] for row in report.get("results", []))
    counts.setdefault(chip, Counter()).update(found)
    failed = [
        f"{row['clause']}: {row.get('reason', '')}" for row in report.get("results", []) if row["outcome"] == "failed"
    ]
    assert done.returncode == 0, f"on the emulated {chip}:\n" + ("\n".join(failed) or last(done))
    assert report["lanes"][0]["name"] == f"{chip} (emulated)"
    assert found["passed"] > least


_RANK_ENDED = r"rank (\d): (\d+) passed, (\d+) failed"


def run_together(chip: str, files: list[str], environment: dict[str, str]) -> dict[str, str]:
    """What is wrong with each of ``files``, run in one process."""
    found = emulated_files(chip, *(INSIDE / f"{file}.py" for file in files), environment=environment)
    return {f"{file}-{chip}": text for file, text in found.items()}


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """What was chosen of the runs, all started."""
    need_emulation()
    emulation.prepare()  # fetches and compiles, before two would at a time
    chosen = {
        item.name.partition("[")[2][:-1] for item in request.session.items if item.name.startswith("test_on_cards[")
    }
    together: dict[str, Future[Any]] = {}
    told = measuring.told()
    futures: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, (file, chip) in zip(NAMES, RUNS, strict=True):
            if name not in chosen:
                continue
            if file not in TOGETHER.get(chip, ()):
                futures[name] = pool.submit(run, file, chip)
                continue
            if chip not in together:
                files = [file for file in TOGETHER[chip] if f"{file}-{chip}" in chosen]
                together[chip] = pool.submit(run_together, chip, files, told if chip == MEASURED else {})
            futures[name] = together[chip]
        yield futures
        pool.shutdown(cancel_futures=True)


def _marks(run: tuple[str, str]) -> Any:
    """What runs for each commit has no mark but ``sample``: tiers of a suite that also runs whole are a part of it."""
    file, chip = run
    if file == "conformance" and ("whole conformance", chip) in SLOW:
        return pytest.mark.sample
    kernels = [pytest.mark.kernels] if file in KERNELS and chip in (A2, MX) else []
    return [*kernels, pytest.mark.thorough] if kernels or run in SLOW or chip != A2 else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_marks(one)) for name, one in zip(NAMES, RUNS, strict=True)],
)
def test_on_cards(name: str, started: dict[str, Future[Any]]) -> None:
    wrong = (started[name].result() or {}).get(name, "")
    assert not wrong, wrong


def test_every_file_is_run() -> None:
    there = {path.stem for path in INSIDE.glob("*.py")} - {"conftest"}
    assert there == {file for file, _ in RUNS} - _NO_FILES
