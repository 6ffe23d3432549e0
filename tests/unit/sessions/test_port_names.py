"""``import xamp as amp`` stands for ``from torch.cuda import amp`` and ``from apex import amp``: names, arguments.

Covers: xamp.
"""

from __future__ import annotations

import inspect
import subprocess
import textwrap
from typing import Any

import pytest
from forked_python import python
from torch.cuda import amp as torch_amp

import xamp as amp

pytestmark = pytest.mark.usefixtures("no_other_sessions")

# torch's test of whether its own scaler would work: xamp's always does.
NOT_TAKEN = {"amp_definitely_not_available"}
# What `from apex import amp` offers (its __init__), with the names of the arguments; its init and _amp_state are the
# drop-in's business. None: initialize, whose third argument is the level here.
APEX = {
    "half_function": ["fn"],
    "float_function": ["fn"],
    "promote_function": ["fn"],
    "register_half_function": ["module", "name"],
    "register_float_function": ["module", "name"],
    "register_promote_function": ["module", "name"],
    "scale_loss": ["loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"],
    "disable_casts": [],
    "master_params": ["optimizer"],
    "initialize": None,
    "state_dict": None,
    "load_state_dict": None,
}
# Of Apex's initialize, what keeps its name and meaning. (cast_model_type and patch_torch_functions are the level's.)
APEX_INITIALIZE = {
    "models", "optimizers", "enabled", "opt_level", "keep_batchnorm_fp32", "master_weights", "loss_scale",
    "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale",
}  # fmt: skip

TORCH_NAMES = sorted(name for name, value in vars(torch_amp).items() if not name.startswith("_") and callable(value))


def signature(function: Any) -> list[inspect.Parameter]:
    """Of a class that of ``__init__``: Python 3.13.0 finds none of a class that torch has marked as deprecated."""
    made = vars(function).get("__init__", function) if isinstance(function, type) else function
    return [each for each in inspect.signature(made).parameters.values() if each.name != "self"]


def parameters(function: object) -> list[str]:
    return [parameter.name for parameter in signature(function)]


def test_torch_has_the_names_that_this_test_is_about() -> None:
    assert {"autocast", "GradScaler", "custom_fwd", "custom_bwd"} <= set(TORCH_NAMES)


MORE = {"autocast": ["fp8"], "custom_fwd": ["device_type"], "custom_bwd": ["device_type"]}
"""Arguments that xamp's have besides; ``device_type`` is that of ``torch.amp``'s own functions of these names."""


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name not in NOT_TAKEN])
def test_torchs_names_with_their_arguments(name: str) -> None:
    assert name in amp.__all__
    more = MORE.get(name, [])
    assert [each for each in parameters(getattr(amp, name)) if each not in more] == parameters(getattr(torch_amp, name))
    assert set(more) <= set(parameters(getattr(amp, name)))


@pytest.mark.parametrize("name", ["GradScaler", "custom_fwd", "custom_bwd", "autocast"])
def test_torchs_defaults(name: str) -> None:
    ours, theirs = (signature(getattr(module, name)) for module in (amp, torch_amp))
    own = {each.name: each for each in ours}
    assert all(own[more].default is None for more in MORE.get(name, []))
    given_by_place = [each.name for each in ours if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for place, their in enumerate(theirs):
        assert own[their.name].kind is their.kind
        if their.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert given_by_place[place] == their.name
        if their.name not in (
            "dtype",
            "bwd",
        ):  # None is fp16, as there, found when the region is entered; bwd: as below
            assert own[their.name].default == their.default, their.name


def test_both_may_be_called_before_they_decorate() -> None:
    """As torch.amp's: ``@custom_bwd(device_type="cuda")``, and without arguments."""
    assert signature(amp.custom_bwd)[0].default is None
    assert signature(amp.custom_fwd)[0].default is None


@pytest.mark.parametrize("name", [n for n in dir(torch_amp.GradScaler) if not n.startswith("_")])
def test_no_method_of_torchs_scaler_is_missing(name: str) -> None:
    assert parameters(getattr(amp.GradScaler, name)) == parameters(getattr(torch_amp.GradScaler, name))


@pytest.mark.parametrize("name", APEX)
def test_apexs_names_with_their_arguments(name: str) -> None:
    assert name in amp.__all__
    wanted = APEX[name]
    if wanted is not None:
        assert parameters(getattr(amp, name)) == wanted


def test_apexs_arguments_of_initialize() -> None:
    assert set(parameters(amp.initialize)) >= APEX_INITIALIZE
    assert parameters(amp.initialize)[:3] == ["models", "optimizers", "level"]


def run(script: str) -> str:
    command = [python(), "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_script_for_torch_cuda_amp_runs_when_its_import_is_changed() -> None:
    losses = run("""
        import torch
        import xamp as amp                                   # from torch.cuda import amp

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = amp.GradScaler(init_scale=2.0**10)
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True)
        for step in range(60):
            with amp.autocast(enabled=True):
                out = model(x)
                assert out.dtype is torch.float16
                loss = torch.nn.functional.mse_loss(out.float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
        state = {"model": model.state_dict(), "scaler": scaler.state_dict()}
        scaler.load_state_dict(state["scaler"])
        print(float(loss) < 1e-3, scaler.get_scale())
    """)
    assert losses == "True 1024.0"


def test_a_script_for_apex_runs_when_its_import_is_changed() -> None:
    losses = run("""
        import torch
        import xamp as amp                                   # from apex import amp

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amp.register_half_function(torch, "einsum")
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", keep_batchnorm_fp32="True", loss_scale="128.0", verbosity=0
        )
        x = torch.randn(64, 8)
        y = x.sum(1, keepdim=True)
        for step in range(150):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        with amp.disable_casts():
            pass
        print(float(loss) < 0.05, amp.loss_scale())
    """)
    assert losses == "True 128.0"
