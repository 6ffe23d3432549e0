"""Scripts in the shapes of well-known ones are ported, run on the CPU, and lose what the same AMP by hand loses.

Covers: xamp.port.engine, xamp.port.rules.*.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_python import python
from port_sites import certain, leftovers, spoken

import xamp

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text

pytestmark = pytest.mark.usefixtures("no_other_sessions")

FOLDER = Path(__file__).resolve().parents[2] / "data" / "port"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt") if not path.stem.endswith("by_hand"))
OTHER_LISTS = ("mae",)  # layer_norm: xamp runs it in fp32 on every device, torch's autocast on a CPU in fp16
WITH_LEVELS = {
    "dcgan": "--opt_level",
    "imagenet": "--opt-level",
    "bert": "--fp16_opt_level",
    "vision": "--apex-opt-level",
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    kept = cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32
    yield
    cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32 = kept


def losses(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[float]:
    """What a script prints last, run in this process."""
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    capsys.readouterr()
    left = runpy.run_path(str(path), run_name="__main__")
    for value in left.values():  # the next script may ask for the only session
        if isinstance(value, torch.nn.Module):
            with contextlib.suppress(xamp.XampError):
                xamp.session(value).close()
    del left
    gc.collect()
    found: list[float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_port_loses_what_amp_by_hand_loses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = losses(source(f"{name}.by_hand"), tmp_path, monkeypatch, capsys)
    ported = losses(port_text(source(name)).text, tmp_path, monkeypatch, capsys)
    assert len(ported) == len(by_hand) > 4
    if name in OTHER_LISTS:
        assert ported == pytest.approx(by_hand, rel=1e-4)
    else:
        assert ported == by_hand


@pytest.mark.parametrize("name", WITH_LEVELS)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_port_runs_at_other_levels(
    name: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = port_text(source(name)).text
    o1 = losses(text, tmp_path, monkeypatch, capsys)
    found = losses(text, tmp_path, monkeypatch, capsys, WITH_LEVELS[name], level)
    assert all(math.isclose(a, b, rel_tol=0.05, abs_tol=0.02) for a, b in zip(found, o1, strict=True))


def two_ranks(folder: Path) -> list[float]:
    """The losses that rank 0 of ``train.py`` in ``folder`` prints.

    The scripts end while their DDP still holds the group, as real ones do. On a busy machine a thread of gloo may then
    meet the end of the interpreter, and torch aborts (pytorch/pytorch#190489). Such a run is made again.
    """
    command = [
        python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XAMP_DEVICE": "cpu"}
    for _ in range(3):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


@pytest.mark.slow
def test_two_ranks_of_a_port(tmp_path: Path) -> None:
    found = []
    for text in (port_text(source("ddp")).text, source("ddp.by_hand")):
        (tmp_path / "train.py").write_text(text, encoding="utf-8")
        found.append(two_ranks(tmp_path))
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_certain_is_rewritten(name: str) -> None:
    before = source(name)
    after = port_text(before).text
    assert len(certain(before)) >= 2
    assert certain(after) == []
    assert leftovers(after) == []
    assert spoken(after) == spoken(before)


@pytest.mark.parametrize("name", NAMES)
def test_lines_without_an_edit_are_the_same(name: str) -> None:
    before, after = source(name).splitlines(), port_text(source(name)).text.splitlines()
    kept = [line for line in before if line in after]
    touched = {place.line for place in certain(source(name))}
    assert len(before) - len(kept) <= len(touched) + 12
    assert [line for line in before if line in kept] == kept
