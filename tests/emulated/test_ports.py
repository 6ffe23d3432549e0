"""Ported scripts run to an end on an emulated card: the scripts of tests/data/port, all in one process.

Covers: xamp.port.engine, xamp.port.rules.*.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from emulated_cards import emulate, last

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FOLDER = Path(__file__).resolve().parents[1] / "data" / "port"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt") if not path.stem.endswith(("by_hand", "ddp")))
LEVELS = {"accumulate": "--opt-level", "imagenet": "--opt-level", "bert": "--fp16_opt_level"}
RUN = """
import contextlib, gc, io, json, runpy, sys, torch, xamp
found = {}
for word in sys.argv[1:]:
    script, *arguments = word.split()
    sys.argv = [script, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        left = runpy.run_path(script, run_name="__main__")
    for value in left.values():
        if isinstance(value, torch.nn.Module):
            with contextlib.suppress(xamp.XampError):
                xamp.session(value).close()
    del left
    gc.collect()
    found[word] = json.loads(said.getvalue().splitlines()[-1])
print(json.dumps([xamp.device_type(), found]))
"""


@pytest.mark.parametrize("chip", ["Ascend910B2", "Ascend910A"])
def test_ported_scripts_run_on_a_card(chip: str, tmp_path: Path) -> None:
    words = []
    for name in NAMES:
        script = tmp_path / f"{name}.py"
        script.write_text(port_text((FOLDER / f"{name}.txt").read_text(encoding="utf-8")).text, encoding="utf-8")
        words.append(str(script))
        if name in LEVELS:
            words.append(f"{script} {LEVELS[name]} O2")
    done = emulate(chip, "python", "-W", "ignore", "-c", RUN, *words, XAMP_DEVICE="npu")
    assert done.returncode == 0, last(done)
    device, found = json.loads(done.stdout.splitlines()[-1])
    assert device == "npu"
    assert len(found) == len(words) >= 12
    assert all(len(losses) > 4 and all(map(math.isfinite, losses)) for losses in found.values())


def test_two_ranks_of_a_port_run_on_two_cards(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(port_text((FOLDER / "ddp.txt").read_text(encoding="utf-8")).text, encoding="utf-8")
    command = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    done = emulate("Ascend910B2", *command, devices=2, XAMP_DEVICE="npu", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, last(done)
    losses = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[")))
    assert losses[-1] < losses[0]
