"""``xamp.apex.parallel`` in one process: LARC by hand, SyncBatchNorm against BatchNorm, what is converted.

Covers: xamp.apex.parallel.
"""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xamp.apex import amp, parallel
from xamp.apex.parallel import distributed, multiproc


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc_scales_gradients(clip: bool, decay: float) -> None:
    params = [nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))]
    optimizer = parallel.LARC(
        torch.optim.SGD(params, lr=0.1, weight_decay=decay), trust_coefficient=0.02, clip=clip, eps=1e-8
    )
    params[0].grad, params[1].grad = torch.tensor([0.6, 0.8]), torch.tensor([1.0, 2.0])
    rate = 0.02 * 5.0 / (1.0 + 5.0 * decay + 1e-8)
    rate = min(rate / 0.1, 1.0) if clip else rate
    expected = torch.tensor([3.0, 4.0]) - 0.1 * rate * (torch.tensor([0.6, 0.8]) + decay * torch.tensor([3.0, 4.0]))
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), expected)
    torch.testing.assert_close(params[1].detach(), torch.tensor([-0.1, -0.2]))  # its norm is zero: a plain step
    assert params[2].tolist() == [1.0, 1.0]
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_passes_on_what_an_optimizer_has() -> None:
    inner = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.5)
    optimizer = parallel.LARC(inner)
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups
    assert repr(optimizer) == repr(inner)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    inner.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert inner.param_groups[0]["params"][0].grad is None
    again = parallel.LARC(torch.optim.Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))][:1], lr=0.1))
    again.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["weight_decay"] == 0.5
    assert parallel.LARC.LARC is parallel.LARC


def test_larc_keeps_the_decay_when_a_step_raises() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.5)

    def fail() -> float:
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        parallel.LARC(inner).step(fail)
    assert inner.param_groups[0]["weight_decay"] == 0.5


def _step(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 3)).float().square().sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_larc_have_their_settings_and_step_their_own(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    larc = parallel.LARC(
        torch.optim.SGD(model.parameters(), 0.25, momentum=0.5), trust_coefficient=0.5, clip=False, eps=1e-4
    )
    _step(model, larc)
    pair: Any = [model, larc]
    other, again = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert (again.trust_coefficient, again.clip, again.eps) == (0.5, False, 1e-4)
    start = [p.detach().clone() for p in model.parameters()]
    moved = _step(other, again)
    assert all(map(torch.equal, start, [p.detach() for p in model.parameters()])), "the original stays"
    assert all(map(torch.equal, moved, _step(model, larc)))


def test_a_copy_of_a_managed_larc_is_one() -> None:
    model = nn.Linear(3, 2)
    _, larc = amp.initialize(
        model, parallel.LARC(torch.optim.SGD(model.parameters(), 0.25), clip=False), opt_level="O2", verbosity=0
    )
    assert copy.deepcopy(larc).clip is False


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 2), (2, 4, 3, 2, 2)])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_sync_batch_norm_alone_is_batch_norm(shape: tuple[int, ...], momentum: float | None) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    reference = kind(4, momentum=momentum)
    nn.init.uniform_(reference.weight)
    nn.init.uniform_(reference.bias)
    norm = parallel.convert_syncbn_model(copy.deepcopy(reference))
    assert isinstance(norm, parallel.SyncBatchNorm)
    x = torch.randn(shape)
    for training in (True, True, False):
        reference.train(training)
        norm.train(training)
        torch.testing.assert_close(norm(x), reference(x))
    torch.testing.assert_close(norm.state_dict(), reference.state_dict())


def test_channels_last_addition_and_relu() -> None:
    x, z = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    norm = parallel.SyncBatchNorm(4, channel_last=True, fuse_relu=True)
    nn.init.uniform_(norm.weight)
    expected = F.batch_norm(x.permute(0, 3, 1, 2), None, None, norm.weight, norm.bias, True).permute(0, 2, 3, 1)
    torch.testing.assert_close(norm(x, z), F.relu(expected + z))
    norm.eval()
    plain = F.batch_norm(x.permute(0, 3, 1, 2), norm.running_mean, norm.running_var, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x), F.relu(plain.permute(0, 2, 3, 1)))
    norm._specify_channel_last(False)
    assert norm(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_input(low: torch.dtype) -> None:
    norm, x = parallel.SyncBatchNorm(4), torch.randn(8, 4)
    exact = norm(x.to(low).float())
    out = norm(x.to(low))
    assert out.dtype == low
    torch.testing.assert_close(out.float(), exact, rtol=torch.finfo(low).eps, atol=torch.finfo(low).eps)
    norm.eval()
    assert norm(x.to(low)).dtype == low


def test_wrong_inputs_are_told() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        parallel.SyncBatchNorm(4)(torch.randn(1, 4))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        parallel.SyncBatchNorm(4)(torch.randn(4))


def test_convert_replaces_batch_norms_with_the_same_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
            self.free = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
            self.instance = nn.InstanceNorm2d(2, affine=True)
            self.synced = nn.SyncBatchNorm(2)

    net = Net().eval()
    held = list(net.parameters())
    keys = list(net.state_dict())
    converted: Any = parallel.convert_syncbn_model(net, process_group="group", channel_last=True)
    assert converted is net
    kinds = (type(net.layers[1]), type(net.free), type(net.instance), type(net.synced))
    assert kinds == (parallel.SyncBatchNorm, parallel.SyncBatchNorm, nn.InstanceNorm2d, parallel.SyncBatchNorm)
    assert [id(p) for p in net.parameters()] == [id(p) for p in held]
    assert list(net.state_dict()) == keys
    assert converted.layers[1].process_group == "group"
    assert converted.layers[1].channel_last
    assert not converted.layers[1].training
    assert parallel.create_syncbn_process_group(0) is None


def test_a_norm_on_a_device_without_affine_trains() -> None:
    norm = parallel.SyncBatchNorm(3, affine=False, track_running_stats=False)
    x = torch.randn(5, 3, requires_grad=True)
    torch.testing.assert_close(norm(x), F.batch_norm(x, None, None, training=True))
    norm.eval()
    torch.testing.assert_close(norm(x), F.batch_norm(x, None, None, training=True))


def test_tensors_are_split_by_type() -> None:
    tensors = [torch.ones(1), torch.ones(2).half(), torch.ones(3), torch.ones(4).double(), torch.ones(1).bfloat16()]
    assert [len(bucket) for bucket in distributed.split_half_float_double(tensors)] == [1, 2, 1]
    assert [len(b) for b in distributed.split_by_type(tensors).values()] == [2, 1, 1, 1]
    found: list[torch.Tensor] = []
    distributed.extract_tensors([tensors[0], (tensors[1], [tensors[2]]), "text", 3], found)
    assert all(a is b for a, b in zip(found, tensors[:3], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param is no longer supported as an option"),
        ({"num_allreduce_streams": 2, "delay_allreduce": True}, "allreduce_different_streams"),
        ({"allreduce_trigger_params": [], "delay_allreduce": True}, "only valid if delay_allreduce=False"),
    ],
)
def test_arguments_that_apex_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.DistributedDataParallel(nn.Linear(2, 2), **options)


def test_multiproc_names_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["multiproc", "train.py", "--epochs", "3"])
    assert multiproc.main() == 2
    assert "torchrun --nproc_per_node=N train.py --epochs 3" in capsys.readouterr().err
