"""``kill -9`` at any moment, and the run that resumes ends bit for bit as the one that nobody stopped.

Covers: xamp.sessions.checkpoint, xamp.sessions.session.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import CHECKPOINT, Runs
from lanes import Lane
from stepping import assert_same

KILLS = 20
STEPS = 50
OVERFLOWS = (2, 9, 10, 22, 37, 38, 44)
"""Steps that overflow, some in a row. Between them the scale grows, and does not pass what fp16 can take."""
ORDERS = list(itertools.permutations(("model", "optimizer", "xamp")))
FORMS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "fused": "auto", "accumulate": 1, "growth_interval": 4},
    "sgd": {"optimizer": "sgd", "fused": "auto", "accumulate": 1, "growth_interval": 4},
    "adam-unfused": {"optimizer": "adam", "fused": False, "accumulate": 1, "growth_interval": 4},
    "sgd-accumulating": {"optimizer": "sgd", "fused": "auto", "accumulate": 3, "growth_interval": 4},
}
each_level = pytest.mark.parametrize("level", ["O1", "O2"])
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def runs() -> Iterator[Any]:
    """One set of :class:`Runs` for each device: a function of the lane."""
    opened: dict[str, Runs] = {}

    def of(lane: Lane) -> Runs:
        if str(lane) not in opened:
            script = Path(__file__).with_name("train_worker.py")
            opened[str(lane)] = Runs(script, fork=True).__enter__()
        return opened[str(lane)]

    yield of
    for found in opened.values():
        found.__exit__()


def spec_of(lane: Lane, level: str, form: str, folder: Path) -> dict[str, Any]:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    folder.mkdir()
    told = {"device": str(lane), "folder": str(folder), "level": level, "steps": STEPS, "overflows": OVERFLOWS}
    return {**FORMS[form], **told, "every": 2, "order": ORDERS[0], "seed": 0}


class Whole:
    """The run that nobody stops: how it ended, and how many seconds it took after its first checkpoint."""

    def __init__(self, spec: dict[str, Any], runs: Runs) -> None:
        self.seconds = runs.run(spec).seconds
        self.final = ended(spec)


@pytest.fixture(scope="module")
def uninterrupted(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That run, once for each way to train: a function of lane, level and form."""

    @functools.cache
    def of(lane: Lane, level: str, form: str) -> Whole:
        return Whole(spec_of(lane, level, form, tmp_path_factory.mktemp("whole") / "run"), runs(lane))

    return of


def ended(spec: dict[str, Any]) -> Any:
    return torch.load(Path(spec["folder"]) / "final.pt", weights_only=True)


def draw() -> random.Random:
    """Random moments. ``XAMP_KILL_SEED`` gives those of another day again, as far as the machine's pace allows."""
    seed = int(os.environ.get("XAMP_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"XAMP_KILL_SEED={seed}")
    return random.Random(seed)


@each_level
@each_form
def test_the_run_that_nobody_stops_overflows_and_grows(lane: Lane, level: str, form: str, uninterrupted: Any) -> None:
    final = uninterrupted(lane, level, form).final
    assert final["stats"] == [STEPS - len(OVERFLOWS), len(OVERFLOWS)]
    assert final["scale"] == 2.0**13  # once a window, also where it has three micro-batches
    assert bool(final["xamp"]["masters"][0]) == (level == "O2")
    assert {bool(torch.isfinite(p).all()) for p in final["masters"]} == {True}


@each_level
@each_form
def test_one_run_killed_again_and_again(
    lane: Lane, level: str, form: str, runs: Any, uninterrupted: Any, tmp_path: Path
) -> None:
    expected, rng = uninterrupted(lane, level, form), draw()
    pause = expected.seconds / STEPS
    kills = 0
    for chain in range(5):
        spec = spec_of(lane, level, form, tmp_path / f"run{chain}")
        killed = True
        while killed:
            moment = (rng.randrange(2), rng.uniform(0.0, 4 * pause)) if kills < 3 * KILLS else None
            life = {**spec, "order": ORDERS[kills % len(ORDERS)], "seed": kills}
            killed = runs(lane).run(life, moment).killed
            kills += killed
        assert_same(ended(spec), expected.final)
        if kills >= len(ORDERS):
            break
        pause /= 4  # it was measured while the machine had other work, so that few lives ended early
    print(f"{kills} kills")
    assert kills >= len(ORDERS), "each order was to be used"


@each_level
def test_twenty_runs_each_killed_once(lane: Lane, level: str, runs: Any, uninterrupted: Any, tmp_path: Path) -> None:
    expected, rng = uninterrupted(lane, level, "adam"), draw()
    pause = expected.seconds / STEPS
    kills = attempt = 0
    while kills < KILLS:
        attempt += 1
        spec = spec_of(lane, level, "adam", tmp_path / f"run{attempt}")
        kills += runs(lane).run(spec, (rng.randrange(1, STEPS // 2 - 4), rng.uniform(0.0, 2 * pause))).killed
        runs(lane).run({**spec, "order": ORDERS[kills % len(ORDERS)], "seed": attempt})
        assert_same(ended(spec), expected.final)
        assert attempt < 4 * KILLS, "runs end before they are killed"


@pytest.mark.parametrize(
    "die",
    [
        {"at": "bytes", "size": 1},
        {"at": "bytes", "size": 2000},
        {"at": "before fsync"},
        {"at": "before replace"},
        {"at": "after replace"},
    ],
    ids=lambda die: " ".join(map(str, die.values())),
)
@each_level
def test_killed_in_the_middle_of_writing(
    lane: Lane, level: str, die: dict[str, Any], runs: Any, uninterrupted: Any, tmp_path: Path
) -> None:
    """The second checkpoint is the one that is being written: the file is the first, whole, or the second, whole."""
    spec = spec_of(lane, level, "adam", tmp_path / "run")
    assert runs(lane).run({**spec, "die": {**die, "nth": 2}}).killed
    kept = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)
    assert kept["step"] == (4 if die["at"] == "after replace" else 2)
    assert (tmp_path / "run" / f"{CHECKPOINT}.tmp").exists() == (die["at"] != "after replace")
    assert not runs(lane).run({**spec, "seed": 1}).killed
    assert_same(ended(spec), uninterrupted(lane, level, "adam").final)


def test_a_worker_that_is_started_anew_is_killed_too(lane: Lane, uninterrupted: Any, tmp_path: Path) -> None:
    """As on a device whose runtime survives no fork."""
    spec = spec_of(lane, "O2", "sgd", tmp_path / "run")
    with Runs(Path(__file__).with_name("train_worker.py"), fork=False) as runs:
        assert runs.run(spec, (3, 0.0)).killed
        assert not runs.run({**spec, "seed": 1}).killed
    assert_same(ended(spec), uninterrupted(lane, "O2", "sgd").final)


def test_a_worker_that_fails_by_itself_is_not_taken_for_killed(lane: Lane, runs: Any, tmp_path: Path) -> None:
    spec = spec_of(lane, "O2", "sgd", tmp_path / "run")
    with pytest.raises(RuntimeError, match="it ended with 1 after"):
        runs(lane).run({**spec, "level": "O9"})
