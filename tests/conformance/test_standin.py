"""A stand-in that has a card's gaps and manners: a sample of the suite, and of the tests marked ``device``, on it.

The whole of both is what ``ci/device.sh standin`` runs.

Covers: xamp.testing.facts, xamp.torch_compat.kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from site_packages import ROOT, install, plain_environment

OUTSIDE = ROOT / "tests" / "outside"
RECORDED = OUTSIDE / "standin" / "xamp_standin" / "facts" / "h100.json"
# Operators without a kernel on the CPU: nobody can see there what autocast does to them.
UNSEEN = {"_scaled_dot_product_flash_attention", "cudnn_convolution", "cudnn_convolution_transpose"}
CLAUSES = (
    *("probe.*", "levels.*", "operators.recurrent_layer", "operators.result_dtype", "optimizers.declared_form_is_used"),
    *("optimizers.fused_works_or_is_refused", "optimizers.close_gives_back_fp32", "scaling.no_host_reads_when_fused"),
    *("scaling.static_one_can_be_checked", "scaling.accumulation_equals_one_batch"),
)
TESTS = (
    "tests/unit/sessions/test_all_or_nothing.py::test_close_before_any_step_gives_everything_back_to_the_bit",
    "tests/unit/scaling/test_step_scale.py",
    "tests/unit/scaling/test_step_accumulate.py",
    "tests/unit/scaling/test_step_optimizer.py",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in installed in it, and with the abacus, on whose memory and kernels it is built."""
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch has no hooks for a device that is written in Python")
    return install(tmp_path_factory.mktemp("standin") / "site", OUTSIDE / "abacus", OUTSIDE / "standin")


def run(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = plain_environment(site, **variables)
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def other_facts() -> dict[str, Any]:
    """Those of a device that differs from the recorded one in everything."""
    facts: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    lists: dict[str, str] = facts["autocast"]
    text = "\"fill\" not implemented for 'Half'"
    return {
        **facts,
        "refuses": {
            "aten::_foreach_mul_.Tensor": {"float16": text, "float64": "too wide"},
            "aten::zero_": {"float64": text},
        },
        "fp32_numbers": ["aten::_fused_adamw_"],
        "fused": {**dict.fromkeys(facts["fused"], ""), "SGD": "no {dtype} on {device}"},
        "capturable": facts["capturable"],
        "autocast": {**lists, "lower": lists["lower"] + " exp", "fp32": lists["fp32"].replace(" exp ", " ")},
        "recurrent": "",
        "copies": {"late_by": 40},
        "waits": ["aten::_local_scalar_dense"],
        "fork": "",
    }


@pytest.mark.parametrize("name", ["recorded", "in a result of ci/gpu.sh"])
def test_what_is_recorded_on_it_are_its_facts(name: str, site: Path, tmp_path: Path) -> None:
    given = json.loads(RECORDED.read_text(encoding="utf-8")) if name == "recorded" else other_facts()
    written = given if name == "recorded" else {"schema": 1, "facts": given}
    (tmp_path / "given.json").write_text(json.dumps(written), encoding="utf-8")
    words = ["-m", "xamp.testing.facts", "--device", "standin", "--json", str(tmp_path / "found.json")]
    done = run(site, *words, XAMP_STANDIN_FACTS=str(tmp_path / "given.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found.pop("about")["card"] == f"stand-in for {given.pop('about')['card']}"
    for facts in (given, found):
        facts["autocast"] = {kind: set(names.split()) - UNSEEN for kind, names in facts["autocast"].items()}
    assert found == given


def test_it_passes_a_sample_of_the_suite(site: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    clauses = [f"--clause={clause}" for clause in CLAUSES]
    require = "--require=O0,O1,O2,O3,O4,O5,fp16,bf16,fused,portable,native"
    words = ["-m", "xamp", "conformance", "--device", "standin", "--json", str(results), require, *clauses]
    done = run(site, *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = json.loads(results.read_text(encoding="utf-8"))["counts"]
    assert counts["passed"] > 300
    assert counts.get("skipped", 0) == 0


def test_it_passes_a_sample_of_the_device_tests(site: Path) -> None:
    options = ["-m", "device", "--device", "standin", "--require", "standin", "-q", "-p", "no:cacheprovider"]
    done = run(site, "-m", "pytest", *options, *TESTS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
