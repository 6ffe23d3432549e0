"""The benchmarks of the step in one pass: each kernel has a line, and a form that should run and does not ends them.

Covers: benchmarks.kernels, benchmarks.one_pass, benchmarks.one_pass_host.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels, one_pass, one_pass_host
from xamp.plans import available

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", kernels.RULES)
def test_each_launch_of_a_step_is_timed(name: str) -> None:
    figures = kernels._figures("case", name, [torch.Size((5,)), torch.Size((2, 3))], torch.float16, CPU, 1e9, 1)
    more = {"LAMB": ["by_row"], "NovoGrad": ["by_row"]}.get(name, [])
    wanted = ["sums", "total", "clip_factor", "factors", "step", "all", *more]
    assert sorted(figure.case for figure in figures) == sorted(f"case: {kernel}" for kernel in wanted)
    assert all(figure.value > 0.0 for figure in figures)
    shares = [figure.case for figure in figures if figure.unit == "of a copy"]
    assert ("case: step" in shares) is (name != "LAMB")  # which has two of another size
    assert "case: all" in shares


@pytest.mark.parametrize("run", [lambda: kernels.run(CPU, 1), lambda: one_pass.counts(CPU)])
def test_a_form_that_should_run_and_does_not_ends_it(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(run)
    monkeypatch.setattr(available, "refusal", lambda device: "a kernel is wrong")
    assert "left out: a kernel is wrong" in run()[0].case
    monkeypatch.setattr(available, "expects", lambda device: True)
    with pytest.raises(RuntimeError, match="the kernels should run on cpu, and do not: a kernel is wrong"):
        run()


def test_the_hosts_part_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass_host, "COUNTS", (2, 3))
    figures = one_pass_host.host(rounds=6)
    assert [figure.case.split(",")[2] for figure in figures] == [
        f" {count} tensors: {what} over torch's fused AdamW"
        for count in (2, 3)
        for what in ("check and step", "FusedAdam of xamp.apex")
    ]
    assert all(figure.value > 0.0 for figure in figures)
