"""What torch_npu has of its own: optimizers over flat buffers, and storage formats. Taken where right, else refused.

Covers: backends.npu.torch_npu_features, backends.npu.emulation.private.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xamp
from xamp.apex import amp
from xamp.backends.npu.chips import Chip
from xamp.contract import Backend
from xamp.errors import StateError, UnsupportedPolicy

NPU = torch.device("npu", 0)
torch_npu: Any = sys.modules["torch_npu"]
NCHW, ND, NC1HWC0, FRACTAL_Z, FRACTAL_NZ = 0, 2, 3, 4, 29
Make = Callable[[Any], Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Lamb": {"lr": 0.01},
    "AdamP": {"lr": 0.01},
    "BertAdam": {"lr": 0.01},
    "RMSpropTF": {"lr": 0.01, "momentum": 0.5},
}
IN_TORCH = [name for name in OPTIONS if hasattr(torch.optim, name)]


def joined(name: str) -> Make:
    return lambda params: getattr(torch_npu.optim, f"NpuFused{name}")(params, **OPTIONS[name])


def plain(name: str) -> Make:
    return lambda params: getattr(torch.optim, name)(params, foreach=False, **OPTIONS[name])


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(NPU)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(NPU)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


OVERFLOWS = (0, 3, 4)


def iterate(model: nn.Module, optimizer: Any, step: int, backend: Backend | None = None) -> None:
    optimizer.zero_grad()
    with xamp.scale_loss(model(batch(step)).square().mean(), optimizer) as scaled:
        scaled.backward()
        if backend is not None and step in OVERFLOWS:
            backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
    optimizer.step()


def train(make: Make, level: str, backend: Backend | None) -> tuple[list[float], list[torch.Tensor]]:
    model = make_net()
    optimizer = make(model.parameters())
    xamp.initialize(model, optimizer, level, verbosity=0, fused=False)
    for step in range(7):
        iterate(model, optimizer, step, backend)
    return [xamp.loss_scale(optimizer)], values(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_a_joined_optimizer_trains_as_torchs(name: str, level: str, backend: Backend, chip: Chip) -> None:
    if level == "O4" and not chip.bf16:
        pytest.skip("no bfloat16 there")
    overflowing = backend if level == "O1" else None
    found, wanted = train(joined(name), level, overflowing), train(plain(name), level, overflowing)
    assert found[0] == wanted[0]
    assert found[0][0] == (1.0 if overflowing is None else 65536.0 / 8)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:This overload of add_ is deprecated")
@pytest.mark.parametrize("name", OPTIONS)
def test_by_hand_steps_are_skipped_and_the_others_are_its_own(name: str, backend: Backend) -> None:
    """In fp32 a scale that is a power of two changes no bit."""
    found = []
    for scaler in (xamp.GradScaler(init_scale=64.0), None):
        model = make_net()
        optimizer = joined(name)(model.parameters())
        for step in (step for step in range(7) if scaler or step not in OVERFLOWS):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            if step in OVERFLOWS:
                backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
            scaler.step(optimizer)
            scaler.update()
        found.append(values(model))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_at_levels_that_cast_it_trains_as_torchs(
    name: str, level: str, loss_scale: Any, backend: Backend, chip: Chip
) -> None:
    """Overflows, two backwards for a step, clipping, and ``zero_grad`` of the optimizer and of the model."""
    if level == "O5" and not chip.bf16:
        pytest.skip("no bfloat16 there")

    def run(make: Make) -> tuple[float, list[torch.Tensor]]:
        model = make_net()
        optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group["eps"] = 1e-3  # of Adam, at O3: fp16 has no 1e-8
        xamp.initialize(model, optimizer, level, verbosity=0, fused=False, loss_scale=loss_scale)
        for step in range(8):
            (model if step == 6 else optimizer).zero_grad()
            for part in range(2 if step in (2, 5) else 1):
                with xamp.scale_loss(model(batch(step + part)).square().mean(), optimizer) as scaled:
                    scaled.backward()
                    if step in OVERFLOWS:
                        backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
            xamp.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
        return xamp.loss_scale(optimizer), values(model)

    found, wanted = run(joined(name)), run(plain(name))
    assert found[0] == wanted[0]
    bound = 4e-3 if level != "O5" else 2e-2  # one unit in the last place of fp16, bf16
    torch.testing.assert_close(found[1], wanted[1], rtol=bound, atol=bound if level == "O3" else bound / 8)


def test_its_own_clipping_sees_the_gradients_of_the_masters() -> None:
    model = make_net()
    optimizer: Any = joined("SGD")(model.parameters())
    xamp.initialize(model, optimizer, "O2", verbosity=0, loss_scale=128.0)
    for step in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(model(batch(step)).square().mean(), optimizer) as scaled:
            scaled.backward()
        grads = torch.cat([m.grad.flatten() for m in xamp.master_params(optimizer) if m.grad is not None])
        torch.testing.assert_close(optimizer.clip_grad_norm_fused_(1e-3), grads.norm(), rtol=1e-4, atol=0)
        clipped = torch.cat([m.grad.flatten() for m in xamp.master_params(optimizer) if m.grad is not None])
        assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-2)
        optimizer.step()


def test_a_run_at_o2_goes_on_with_the_same_numbers() -> None:
    def start() -> tuple[nn.Module, Any]:
        model = make_net()
        optimizer = joined("Adam")(model.parameters())
        xamp.initialize(model, optimizer, "O2", verbosity=0)
        return model, optimizer

    model, optimizer = start()
    for step in range(3):
        iterate(model, optimizer, step)
    other, its = start()
    other.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    xamp.load_state_dict(xamp.state_dict(optimizer), its)
    for step in range(3, 6):
        iterate(model, optimizer, step)
        iterate(other, its, step)
    assert all(map(torch.equal, values(other), values(model)))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_amp_trains_with_it_as_scripts_do(level: str) -> None:
    """What most scripts for a card do: O2, a static scale of 128 and ``combine_grad``."""
    found = []
    for make in (joined("SGD"), plain("SGD")):
        model = make_net()
        model, optimizer = amp.initialize(
            model, make(model.parameters()), opt_level=level, loss_scale=128.0, combine_grad=True, verbosity=0
        )
        for step in range(5):
            optimizer.zero_grad()
            with amp.scale_loss(model(batch(step)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        found.append(values(model))
    torch.testing.assert_close(found[0], found[1], rtol=4e-3, atol=4e-3 if level == "O3" else 5e-4)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_levels_that_cast_refuse_parameters_that_it_joined(level: str, chip: Chip) -> None:
    if level == "O5" and not chip.bf16:
        pytest.skip("no bfloat16 there")
    model = make_net()
    optimizer = joined("SGD")(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedPolicy, match=r"NpuFusedSGD steps flat buffers.*O0, O1, O4; or use torch.optim.SGD"):
        xamp.initialize(model, optimizer, level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    xamp.initialize(model, optimizer, "O1", verbosity=0)


def clear_to_none(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()
    with xamp.scale_loss(model(batch(0)).sum(), optimizer) as scaled:
        scaled.backward()


def use_a_part(model: Any, optimizer: Any) -> None:
    clear_to_none(model[0], optimizer)
    for p in model[2].parameters():
        p.grad = None


def load_late(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (clear_to_none, "not all gradients are those that it joined. Clear them with optimizer.zero_grad"),
        (use_a_part, "not all gradients are those that it joined"),
        (load_late, "its state was loaded after that. Load it before the first step"),
        (move, "a parameter has other memory now. Make the optimizer anew"),
    ],
)
def test_what_it_would_step_wrongly_is_refused(spoil: Callable[[Any, Any], None], why: str) -> None:
    model = make_net()
    optimizer = joined("AdamW")(model.parameters())
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    iterate(model, optimizer, 0)
    iterate(model, optimizer, 1)
    before = values(model)
    optimizer.zero_grad()
    with xamp.scale_loss(model(batch(2)).square().mean(), optimizer) as scaled:
        scaled.backward()
    spoil(model, optimizer)
    with pytest.raises(StateError, match=f"NpuFusedAdamW joined parameters.*{why}.*Or use torch.optim.AdamW"):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))


def test_a_checkpoint_goes_on_with_the_same_numbers() -> None:
    def start() -> tuple[nn.Module, Any]:
        model = make_net()
        optimizer = joined("Adam")(model.parameters())
        xamp.initialize(model, optimizer, "O1", verbosity=0)
        return model, optimizer

    model, optimizer = start()
    for step in range(3):
        iterate(model, optimizer, step)
    other, its = start()
    other.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    xamp.load_state_dict(xamp.state_dict(optimizer), its)
    for step in range(3, 6):
        iterate(model, optimizer, step)
        iterate(other, its, step)
    assert all(map(torch.equal, values(other), values(model)))


# ---- storage formats ----


@pytest.fixture
def _private_formats(chip: Chip) -> Iterator[None]:
    """Older chips allow them by themselves."""
    before = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    torch.npu.config.allow_internal_format = True
    yield
    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "disable" if before == b"disable" else "enable"})


def formats(model: nn.Module) -> list[int]:
    return [int(torch_npu.get_npu_format(p)) for p in model.parameters()]


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).to(NPU)


def cast(model: nn.Module, *wanted: int) -> nn.Module:
    for p, layout in zip(model.parameters(), wanted, strict=True):
        p.data = torch_npu.npu_format_cast(p.data, layout)
    return model


USUAL = [ND] * 6
PRIVATE = [FRACTAL_Z, ND, NC1HWC0, NC1HWC0, FRACTAL_NZ, ND]
MOVED = [FRACTAL_Z, ND, NC1HWC0, NC1HWC0, ND, ND]
"""By model.to() on the older chips, which allow private formats unless told otherwise."""


def test_moving_a_model_makes_private_formats_where_they_are_allowed(chip: Chip) -> None:
    model = make_cnn()
    compiles = not torch.npu.is_jit_compile_false()
    assert formats(model) == (MOVED if chip.number < 220 and compiles else [NCHW, *USUAL[1:]])
    allowed = formats(cast(model, *PRIVATE)) == PRIVATE
    assert allowed == (chip.number < 220)


@pytest.mark.usefixtures("_private_formats")
def test_a_format_is_what_was_cast_to() -> None:
    x = torch.arange(15.0, device=NPU).reshape(3, 5).clone()
    y = torch_npu.npu_format_cast(x, FRACTAL_NZ)
    assert (torch_npu.get_npu_format(x), torch_npu.get_npu_format(y)) == (ND, FRACTAL_NZ)
    assert torch_npu.get_storage_size(y) == 256, "16 x 16, with what fills it up"
    assert y.tolist() == torch_npu.npu_format_cast(y, ND).tolist() == x.tolist()
    torch_npu.npu_format_cast_(x, y)
    assert torch_npu.get_npu_format(x) == FRACTAL_NZ
    with pytest.raises(RuntimeError, match="operator _foreach_copy_ do not support internal format"):
        torch._foreach_copy_([x], [x])


@pytest.mark.usefixtures("_private_formats")
@pytest.mark.parametrize("view", [torch.Tensor.flatten, torch.t, lambda x: x[1:, 2:5]], ids=["flat", "turned", "part"])
def test_the_format_of_a_view_is_that_of_all_its_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(torch.rand(32, 64, device=NPU))
    y = torch_npu.npu_format_cast(x, FRACTAL_NZ)
    assert torch_npu.get_npu_format(y) == FRACTAL_NZ
    assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())
    back = torch_npu.npu_format_cast(y, ND)
    assert (torch_npu.get_npu_format(back), back.tolist(), y.tolist()) == (ND, x.tolist(), x.tolist())


def run_cnn(model: nn.Module, level: str, backend: Backend) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, foreach=False)
    xamp.initialize(model, optimizer, level, verbosity=0)
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        x, y = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(NPU)).float(), y.to(NPU))
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if step == 2 and level in ("O1", "O2"):
                backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
        optimizer.step()
    xamp.session(model).close()
    return [tensor.float().cpu() for tensor in model.state_dict().values()]


@pytest.mark.usefixtures("_private_formats")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_parameters_in_private_formats_train_as_others(level: str, backend: Backend, chip: Chip) -> None:
    if level in ("O4", "O5") and not chip.bf16:
        pytest.skip("no bfloat16 there")
    model = cast(make_cnn(), *PRIVATE)
    assert formats(model) == PRIVATE
    found, wanted = run_cnn(model, level, backend), run_cnn(cast(make_cnn(), *USUAL), level, backend)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_private_formats")
def test_fused_forms_do_not_take_them() -> None:
    model = cast(make_cnn(), *PRIVATE)
    with pytest.raises(UnsupportedPolicy, match="Adam was made with fused=True, whose kernel takes no parameter in a"):
        xamp.initialize(model, torch.optim.Adam(model.parameters(), fused=True), "O1", verbosity=0)
    with pytest.raises(UnsupportedPolicy, match="Adam has no fused implementation"):
        xamp.initialize(model, torch.optim.Adam(model.parameters()), "O1", fused=True, verbosity=0)
    for layouts, foreach, fused in ((PRIVATE, False, None), (USUAL, None, True)):
        optimizer = torch.optim.Adam(cast(model, *layouts).parameters(), foreach=foreach)
        xamp.initialize(model, optimizer, "O1", verbosity=0)
        assert optimizer.param_groups[0]["fused"] is fused
        xamp.session(model).close()
    xamp.initialize(model, torch.optim.Adam(model.parameters(), fused=True), "O1", verbosity=0)
