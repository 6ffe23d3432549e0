"""A level is one row: with one more in the table it runs in ``initialize``, the commands and the suite, untouched.

Covers: xamp.policy.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_packages import ROOT, plain_environment

from xamp.policy import LEVELS

ROW = 'Level("O6", ("bf16-scaled",), "bfloat16", True, True, False, "dynamic"),'
"""As O5, with a dynamic scale, and batch norm in bf16."""
LAST_ROW = '        Level("O5",'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this xamp in it, and one line more in the table."""
    folder = tmp_path_factory.mktemp("added")
    leave = shutil.ignore_patterns("__pycache__", "emulation", "backends")
    shutil.copytree(ROOT / "xamp", folder / "xamp", ignore=leave)
    shutil.copytree(ROOT / "backends", folder / "xamp" / "backends", ignore=leave)
    table = folder / "xamp" / "policy.py"
    lines = table.read_text(encoding="utf-8").splitlines()
    (last,) = [number for number, line in enumerate(lines) if line.startswith(LAST_ROW)]
    lines.insert(last + 1, f"        {ROW}")
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def run(site: Path, *words: str) -> str:
    """Python with ``words``, by the xamp in ``site``; what it prints."""
    environment = {**plain_environment(), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_it_trains_and_resumes(site: Path) -> None:
    script = """
import copy, torch, xamp
assert "O6" not in xamp.__file__
x = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))

def start(level):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return xamp.initialize(model, optimizer, level=level, growth_interval=4, verbosity=0)

def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        with xamp.scale_loss(loss * (float("inf") if step == 2 else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

model, optimizer = start("bf16-scaled")
policy = xamp.session(model).policy
losses = train(model, optimizer, 12)
states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), xamp.state_dict(optimizer)])
scale = xamp.loss_scale(optimizer)
more = train(model, optimizer, 3)
twin, other = start("o6")
for target, state in zip((twin, other, xamp.session(twin)), states):
    target.load_state_dict(state)
resumed = [xamp.loss_scale(other), train(twin, other, 3)] == [scale, more]
stats = xamp.session(model).stats
xamp.session(model).close()
print(
    policy.level,
    policy.dtype,
    {p.dtype for p in twin.parameters()},
    losses[-1] < 0.5 * losses[0],
    scale,
    (stats.applied, stats.skipped),
    resumed,
    {p.dtype for p in model.parameters()},
    sep=" | ",
)
"""
    found = run(site, "-c", script).strip().split(" | ")
    scale = str(2.0**15 * 4)  # down at the third step, up after four clean ones and four more
    assert found == [
        *("O6", "torch.bfloat16", "{torch.bfloat16}", "True", scale, "(13, 2)", "True", "{torch.float32}"),
    ]


def test_doctor_lists_it(site: Path) -> None:
    found = json.loads(run(site, "-m", "xamp", "doctor", "--json"))
    (cpu,) = [row for row in found["backends"] if row["name"] == "cpu"]
    assert cpu["capabilities"]["levels"] == [*LEVELS, "O6"]
    assert cpu["findings"] == []


def test_errors_name_it(site: Path) -> None:
    script = """
import torch, xamp
for told in ({"level": "O7"}, {"level": "O1", "master_weights": True}, {"level": "O0", "dtype": "bfloat16"}):
    try:
        xamp.initialize(torch.nn.Linear(1, 1), **told)
    except xamp.XampError as error:
        print(error)
"""
    unknown, masters, dtype = run(site, "-c", script).splitlines()
    assert "'O6', 'bf16-scaled'" in unknown
    assert "use O2, O5 or O6" in masters
    assert "O4, O5, O6 for bfloat16" in dtype


@pytest.fixture(scope="module")
def clauses(site: Path) -> set[str]:
    """The suite's, with what they run at, in the form ``[O2-Adam]``."""
    (site / "test_suite.py").write_text(
        "from xamp.testing import Conformance\n\n\nclass Test(Conformance):\n    backend = 'cpu'\n", encoding="utf-8"
    )
    options = ("-q", "--collect-only", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(site))
    return set(re.findall(r"::(test_\S+)$", run(site, "-m", "pytest", *options, str(site / "test_suite.py")), re.M))


SINGLED_OUT = {"test_vanishing_gradients"}
"""Clauses about fp16, which is what sets O2 apart from a level that is alike but for the dtype."""


def test_every_list_of_the_suite_has_it(clauses: set[str]) -> None:
    """Where O2 is, which also has masters and a dynamic scale, O6 is too."""
    alike = {each for each in clauses if re.search(r"\bO2\b", each) and "O6" not in each}
    assert len(alike) > 250
    missing = {each for each in alike if re.sub(r"\bO2\b", "O6", each) not in clauses}
    assert {each.partition("[")[0] for each in missing} == SINGLED_OUT


FEW = (
    "levels.effective[O6]",
    "levels.keep_fp32[O6]",
    "levels.all_or_nothing[O6]",
    "levels.state_after_forward[O6]",
    "numerics.gradients_near_fp64[O6-convolutions]",
    "numerics.gradients_near_fp64[O6-transformer]",
    "numerics.training_follows_fp32[O6-convolutions]",
    "numerics.inference[O6-recurrent]",
    "optimizers.clipping_sees_plain_gradients[2.0-SGD-momentum-for-loop-O6]",
    "optimizers.scheduler[StepLR-before-O6]",
    "scaling.scale_sequence[wide-auto-O6]",
    "scaling.floor[unfused-O6]",
    "scaling.static_scale_skips[128-unfused-O6]",
    "scaling.no_host_reads_when_static[O6]",
    "scaling.accumulation_equals_one_batch[SGD-momentum-for-loop-O6]",
    "scaling.sessions_side_by_side",
    "checkpoint.resume_is_bit_identical[O6-Adam]",
    "checkpoint.load_order_is_free[O6-xamp-model-optimizer]",
    "checkpoint.other_level[O6-O3]",
    "checkpoint.other_level[O1-O6]",
)
"""Some clauses at O6, of each tier that takes no processes and no compiler."""


def test_the_suite_passes_at_it(site: Path) -> None:
    asked = [f"--clause={each}" for each in FEW]
    results = site / "results.json"
    run(site, "-m", "xamp", "conformance", "--device", "cpu", "--require", "O6", "--json", str(results), *asked)
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    assert {each["clause"]: each["outcome"] for each in found["results"]} == dict.fromkeys(FEW, "passed")


def test_readme_s_table_is_the_levels() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Levels")[2].partition("## ")[0]
    short = {None: "fp32", "float16": "fp16", "bfloat16": "bf16"}
    wanted = []
    for row in LEVELS.values():
        lower = short[row.dtype]
        stored = lower if row.casts_parameters else "fp32"
        scale = "dynamic" if row.dynamic else f"{row.loss_scale:g}, static"
        norm = "by op policy" if row.keep_batchnorm_fp32 is None else "fp32" if row.keep_batchnorm_fp32 else lower
        masters = "fp32" if row.master_weights else "none" if row.casts_parameters else "-"
        runs = f"autocast to {lower}" if row.casts_operators else lower
        wanted.append([row.name, ", ".join(f"`{alias}`" for alias in row.aliases), stored, masters, runs, norm, scale])
    rows = re.findall(r"^\| (O\d.*)\|$", text, re.M)
    assert [[cell.strip() for cell in row.split("|")] for row in rows] == wanted
