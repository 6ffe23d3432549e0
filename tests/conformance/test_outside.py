"""A device that nobody here owns, shipped by another wheel, found by its entry point alone: it passes the suite.

Covers: xamp.registry.plugins, xamp.contract, xamp.testing.run.
"""

from __future__ import annotations

import json
import re
import site as own
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from site_packages import ROOT, install, plain_environment

WHEEL = Path(__file__).resolve().parent.parent / "outside" / "abacus"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch has no hooks for a device that is written in Python")
    return install(tmp_path_factory.mktemp("outside") / "site", WHEEL)


def run(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    environment = plain_environment(site, **variables)
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=900, check=False)


def test_it_is_found_by_its_entry_point(site: Path) -> None:
    done = run(site, "-m", "xamp", "doctor", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    (row,) = [row for row in found["backends"] if row["name"] == "abacus"]
    assert row["usable"], row
    assert row["source"] == "xamp-abacus 1.5"
    assert not row["findings"]
    assert found["chosen"]["device"] == "abacus"


def test_its_operators_can_be_looked_at(site: Path) -> None:
    done = run(site, "-m", "xamp", "policy", "show", "abacus", "--json")
    found = json.loads(done.stdout)
    (row,) = [row for row in found["rows"] if row["overload"] == "layer_norm"]
    assert (row["native"], row["added"]) == ("lower", "fp32")
    assert row["results"]["lower"] == "float32"


def test_a_script_trains_on_it(site: Path) -> None:
    script = """
import torch, xamp
device = xamp.device()
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
model, optimizer = xamp.initialize(model, optimizer, level="O2", verbosity=0)
x = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)).to(device)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    losses.append(loss.item())
print(device.type, losses[-1] < 0.1 * losses[0])
"""
    done = run(site, "-c", script)
    assert done.stdout.split() == ["abacus", "True"], done.stderr[-2000:]


def test_it_passes_tiers_of_the_suite(site: Path, tmp_path: Path) -> None:
    """The whole suite is what ``ci/device.sh abacus`` runs."""
    results = tmp_path / "results.json"
    tiers = [f"--clause={tier}.*" for tier in ("probe", "operators", "levels", "checkpoint")]
    done = run(site, "-m", "xamp", "conformance", "--device", "abacus", "--json", str(results), *tiers)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found["counts"]["passed"] > 450
    assert found["counts"].get("skipped", 0) == 0


PART = (
    "accel/test_accel.py",
    "registry/test_plugins_read.py::test_none_reads_none",
    "casting/test_fp32_settings.py::test_what_is_no_device_is_refused",
    "casting/test_op_policy.py::test_a_banned_loss_is_refused_and_says_what_to_do",
    "casting/test_autocast.py::test_making_one_asks_no_device",
    "cli/test_cli_policy.py::test_a_device_that_nobody_serves_lists_those_that_there_are",
    "docs/test_pages.py::test_every_name_of_accel_says_what_it_does",
    "doctor/test_doctor_torch.py::test_where_no_process_can_be_examined_that_is_the_finding",
    "port/test_port_rules.py::test_what_is_written_exists",
    "run/test_redirect.py::test_an_unknown_device_changes_nothing",
)
"""Tests that have taken the device in use for the CPU, or what is installed for all that there is."""


def test_tests_without_a_lane_do_not_notice_it(site: Path, tmp_path: Path) -> None:
    """They are the same on a machine that has a better device than the CPU: here, one that each process sees."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    base = {"base": str(tmp_path), "platbase": str(tmp_path)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=base))
    lines = [f"import site; site.addsitedir({folder!r})" for folder in [str(site), *own.getsitepackages()]]
    (packages / "seen.pth").write_text("\n".join(lines) + "\n")
    command = [str(tmp_path / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not device"]
    command += [str(ROOT / "tests" / "unit" / name) for name in PART]
    done = subprocess.run(
        command, env=plain_environment(), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert "lane abacus: usable: Abacus" in done.stdout, done.stdout[:4000] + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 400
