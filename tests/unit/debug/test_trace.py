"""``xamp.trace``: its numbers against a hand-written loop, its file, and that it changes nothing.

Covers: xamp.debug.recorder, xamp.debug.trace_file, xamp.debug.sample.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from planted import Mlp, loss_of, optimizer_of, train
from torch.nn.modules import module as hooks

import xamp
from xamp.debug import read
from xamp.debug.trace_file import frame
from xamp.errors import PolicyError, StateError

ROOT = Path(__file__).resolve().parents[3]


def test_the_numbers_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Mlp(2)
    optimizer = optimizer_of(model, lr=0.1)
    results: dict[str, torch.Tensor] = {}
    model.layers[0].register_forward_hook(lambda m, args, result: results.update(layer=result.detach().clone()))
    with xamp.trace(tmp_path / "a.trace", model, optimizer, every=1) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model(model.batch()))
            loss.backward()
            before = [param.detach().double().clone() for param in model.parameters()]
            optimizer.step()
            recorder.step(loss)
            expected = {
                name: (param.grad.double().norm(), old.norm(), (param.detach().double() - old).norm())
                for (name, param), old in zip(model.named_parameters(), before, strict=True)
                if param.grad is not None
            }
            layer = results["layer"].double()
    run = read(tmp_path / "a.trace")
    assert (sorted(run.rows), sorted(run.samples), run.closed) == ([0, 1, 2], [0, 1, 2], True)
    assert run.rows[2].loss == pytest.approx(float(loss.detach()))
    assert {name: pytest.approx(tuple(map(float, numbers))) for name, numbers in expected.items()} == dict(
        run.samples[2].parameters
    )
    zeros = float((layer == 0).double().mean())
    shown = (float(layer.square().mean().sqrt()), float(layer.abs().max()), zeros)
    assert run.samples[2].activations["layers.0"] == pytest.approx(shown, abs=1e-6)
    assert run.samples[2].owners["layers.1.0.weight"] == "layers.1.0"
    assert run.header["level"] is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scale_skips_and_masters(level: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, init_scale=2.0**4, verbosity=0)
    norms = []
    with xamp.trace(tmp_path / "a.trace", model, optimizer, every=1, first_step=5) as recorder:
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model(model.batch())) * (math.inf if step == 1 else 1.0)
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            norms.append(float(xamp.clip_grad_norm_(optimizer, 1e9)))
            optimizer.step()
            recorder.step(loss)
    run = read(tmp_path / "a.trace")
    assert [row.scale for row in run.rows.values()] == [16.0, 8.0, 8.0, 8.0]
    assert [row.skipped for row in run.rows.values()] == [0.0, 1.0, 0.0, 0.0]
    assert sorted(run.rows) == [5, 6, 7, 8]
    assert [run.rows[5].norm, run.rows[8].norm] == pytest.approx([norms[0], norms[3]])
    numbers = run.samples[8].parameters.values()
    assert math.sqrt(sum(gradient**2 for gradient, _, _ in numbers)) == pytest.approx(norms[3])
    assert all(moved == 0.0 for _, _, moved in run.samples[6].parameters.values())
    assert all(moved == pytest.approx(0.1 * gradient, rel=1e-3) for gradient, _, moved in numbers)
    assert "head.weight" in run.samples[8].parameters


def test_the_default_rate_samples_the_beginning_and_then_few(tmp_path: Path) -> None:
    model = Mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xamp.trace(tmp_path / "a.trace", model, optimizer, every=8) as recorder:
        for _ in range(20):
            model(model.batch())
            recorder.step(1.0)
            assert not hooks._global_forward_hooks or recorder._sample is not None
    assert sorted(read(tmp_path / "a.trace").samples) == [*range(10), 16]


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    results = []
    for path in (None, tmp_path / "a.trace"):
        torch.manual_seed(4)
        model = Mlp()
        train(model, torch.optim.Adam(model.parameters(), fused=True), "O2", 5, path=path)
        results.append([*model.parameters(), torch.randn(2)])
    assert all(map(torch.equal, *results))
    assert not hooks._global_forward_hooks


def test_evaluation_and_checkpointing_do_not_count(tmp_path: Path) -> None:
    model = Mlp(1)
    with xamp.trace(tmp_path / "a.trace", model, every=1) as recorder:
        with torch.no_grad():
            model(torch.zeros(8, 16))
        model(torch.ones(8, 16))
        recorder.step()
    (sample,) = read(tmp_path / "a.trace").samples.values()
    with torch.no_grad():
        expected = float(model(torch.ones(8, 16)).square().mean().sqrt())
    assert sample.activations[""][0] == pytest.approx(expected)


def test_a_killed_process_leaves_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    code = (
        "import os, signal, sys, torch, xamp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "recorder = xamp.trace(sys.argv[1], model, every=1)\n"
        "for step in range(40):\n    model(torch.ones(1, 2)).sum().backward()\n    recorder.step(float(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([python(), "-c", code, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -signal.SIGKILL
    run = read(path)
    assert [row.loss for row in run.rows.values()] == [float(step) for step in range(32)]
    assert (len(run.samples), run.closed) == (40, False)
    whole = path.read_bytes()
    for cut in range(len(whole) - 90, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read(path).samples) in (38, 39)
    path.write_bytes(whole[:-3] + b"\1\2\3")
    assert len(read(path).samples) == 39


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    for content in (b"", b"hello, this is no trace", frame("H", b"{}"), frame("S", b"")):
        path.write_bytes(content)
        with pytest.raises(PolicyError, match="is no trace"):
            read(path)
    path.write_bytes(frame("H", b'{"what": "xamp trace", "schema": 2, "xamp": "9.0"}'))
    with pytest.raises(PolicyError, match=r"has schema 2, and this xamp reads schema 1\..*9\.0"):
        read(path)
    with pytest.raises(PolicyError, match="cannot be read"):
        read(tmp_path / "absent")


def test_wrong_arguments(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("every=0", {"every": 0}),
        ("first_step=-1", {"first_step": -1}),
        ("model=int", {"model": 3}),
        ("optimizer=int", {"optimizer": 3}),
    ]
    for match, arguments in wrong:
        with pytest.raises(PolicyError, match=match):
            xamp.trace(tmp_path / "a.trace", **arguments)
    assert not (tmp_path / "a.trace").exists()
    with pytest.raises(PolicyError, match="cannot be written"):
        xamp.trace(tmp_path / "absent" / "a.trace")
    recorder = xamp.trace(tmp_path / "a.trace")
    with pytest.raises(PolicyError, match="must be one number"):
        recorder.step(torch.ones(3))
    recorder.close()
    recorder.close()
    with pytest.raises(StateError, match="is closed"):
        recorder.step()


def test_a_compiled_model_is_traced_without_its_results(tmp_path: Path) -> None:
    inner = torch.nn.Linear(4, 4)
    model: Any = torch.compile(inner, backend="eager")
    with xamp.trace(tmp_path / "a.trace", model, torch.optim.SGD(inner.parameters(), lr=0.1), every=1) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        recorder.step(1.0)
    (sample,) = read(tmp_path / "a.trace").samples.values()
    assert (dict(sample.activations), list(sample.parameters)) == ({}, ["weight", "bias"])
    with xamp.debug.find_nonfinite(model) as found:
        model(torch.full((1, 4), 3e38) * 10)
    assert found.first is not None
    assert found.first.operator == "aten.mul.Tensor"
    with torch.no_grad():
        inner.weight.fill_(2.0)
    with xamp.debug.find_nonfinite(model) as found:
        model(torch.full((1, 4), 3e38))
    assert found.first is not None
    assert (found.first.module, found.first.operator) == ("", "aten.addmm.default")
