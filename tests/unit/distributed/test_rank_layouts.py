"""What is decided from how ranks hold parameters, without ranks: layouts, and the frame of a pipeline's stage.

Covers: xamp.distributed.ranks, xamp.distributed.ddp, xamp.scaling.unscale.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import one_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xamp
from xamp.distributed import ddp
from xamp.distributed.ranks import Layout, _flattened
from xamp.errors import StateError
from xamp.scaling import unscale


def test_a_norm_over_ranks_that_nobody_knows_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert unscale.total_norm([(param, Layout())], 2.0).item() == 5.0
    with pytest.raises(StateError, match=r"^clip_grad_norm_: nobody knows$"):
        unscale.total_norm([(param, Layout(unknown="nobody knows"))], 2.0)


@pytest.mark.parametrize(
    ("shards", "found", "is_known"),
    [([], "outer", True), (["a", "a"], "a", True), (["a", "b"], "outer", False), (["b", "a", "a"], "outer", False)],
)
def test_a_flat_parameter_of_unlike_ones_has_no_layout(shards: list[str], found: str, is_known: bool) -> None:
    outer = Layout(("outer",), ("outer",))
    made = _flattened(outer, [Layout((group,), (group,)) for group in shards])
    assert made.shards == (found,)
    assert (made.unknown == "") is is_known
    assert {*made.holders} == {"outer", *shards}


def test_a_divided_module_that_a_scaler_stepped_is_moved() -> None:
    """torch swaps a DTensor for the moved one, and refuses that where something refers to it weakly."""
    with one_rank():
        model: Any = torch.nn.Linear(4, 2, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), xamp.GradScaler("cpu", init_scale=4.0)
        before = model.weight.to_local().detach().clone()
        scaler.scale(model.weight.to_local().sum()).backward()
        scaler.unscale_(optimizer)
        assert xamp.clip_grad_norm_(optimizer, 1e6).item() == pytest.approx(8**0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.double().weight.to_local(), before.double() - 0.5)


def test_the_frame_of_a_pipelines_stage_is_found_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward() -> bool:
        return ddp._in_pipeline()

    stage: Any = types.ModuleType(ddp._STAGE)
    exec("def run(function):\n    return function()", stage.__dict__)
    run: Callable[[Callable[[], bool]], bool] = stage.run
    monkeypatch.delitem(sys.modules, ddp._STAGE, raising=False)
    assert not run(forward)  # whoever has no pipeline pays for no walk
    monkeypatch.setitem(sys.modules, ddp._STAGE, stage)
    assert run(forward)
    assert run(lambda: forward())
    assert not forward()
