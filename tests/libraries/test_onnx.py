"""ONNX: what the legacy exporter writes of a managed model computes as the model does.

Covers: xamp.casting.forward, xamp.sessions.lowering.
"""

from __future__ import annotations

import pathlib

import pytest
import torch
from library_loop import LEVELS, library
from torch import nn
from torch.optim import SGD

import xamp

onnx = library("onnx")
reference = library("onnx.reference")

X = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_the_legacy_exporter(level: str, tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=16.0)
    with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    model.eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (X,), str(path), dynamo=False, input_names=["x"])
    onnx.checker.check_model(str(path))
    (found,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": X.numpy()})
    close = {"O0": 1e-6, "O1": 5e-3, "O2": 5e-3, "O3": 5e-3}.get(level, 5e-2)
    assert torch.allclose(torch.tensor(found), model(X).detach(), rtol=0, atol=close)
