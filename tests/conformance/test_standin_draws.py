"""One more operator of those that a step calls is refused in one dtype: the device stays, and what is left is right.

Either the suite passes as before, since other operators do its work, or the levels of that dtype go, with the reason.

Covers: xamp.registry.trials, xamp.torch_compat.kernels, xamp.testing.fact_calls.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from site_packages import ROOT, install, plain_environment

from xamp.policy import levels_where
from xamp.testing.fact_calls import OPERATORS

OUTSIDE = ROOT / "tests" / "outside"
RECORDED = OUTSIDE / "standin" / "xamp_standin" / "facts" / "h100.json"
DTYPES = ("float32", "float16", "bfloat16")
CLAUSES = ("probe.*", "levels.*", "scaling.*", "checkpoint.*")
DRAWS = 40  # each takes 20 s and starts two processes


# The recorder knows one more, which only torch's optimizers call: where a device lacks it they fail without xamp too.
ENGINES = sorted(OPERATORS.keys() - {"aten::_foreach_mul_.Scalar"})


def drawn(seed: int) -> tuple[str, str]:
    """An operator, with its overload, and a dtype."""
    draw = random.Random(seed)
    return draw.choice(ENGINES), draw.choice(DTYPES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch has no hooks for a device that is written in Python")
    return install(tmp_path_factory.mktemp("standin") / "site", OUTSIDE / "abacus", OUTSIDE / "standin")


def run(site: Path, facts: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = plain_environment(site, XAMP_STANDIN_FACTS=str(facts))
    command = [sys.executable, "-m", "xamp", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_the_device_stays(seed: int, site: Path, tmp_path: Path) -> None:
    operator, dtype = drawn(seed)
    facts: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    facts["refuses"].setdefault(operator, {})[dtype] = f"no {operator} of {dtype}"
    (tmp_path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    doctor = json.loads(run(site, tmp_path / "facts.json", "doctor", "--json").stdout)
    (row,) = [row for row in doctor["backends"] if row["name"] == "standin"]
    assert doctor["chosen"]["device"] == "standin", row
    can = row["capabilities"]
    gone = dict(can["lacking"])
    assert set(gone) <= {dtype}
    assert set(can["levels"]) == set(levels_where(lambda level: not {level.dtype, "float32"} & set(gone)))
    for reason in gone.values():
        assert f"no {operator} of {dtype}" in reason
        assert any(reason in finding["text"] for finding in row["findings"])
    if not can["levels"]:
        return
    words = ["conformance", "--device", "standin", *(f"--clause={clause}" for clause in CLAUSES)]
    done = run(site, tmp_path / "facts.json", *words)
    assert done.returncode == 0, f"{operator} in {dtype}:\n{done.stdout[-5000:]}{done.stderr[-2000:]}"
