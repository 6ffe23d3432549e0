"""``GradScaler`` and ``autocast`` spelt as in torch.amp: with the device in use, and refused with another one.

Covers: xamp.sessions.grad_scaler, xamp.casting.autocast.
"""

from __future__ import annotations

from typing import Any

import compiling
import pytest
import torch

import xamp
from xamp.errors import PolicyError

X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cpu",), {}),
        ((), {"device": "cpu"}),
        ((torch.device("cpu"),), {}),
        (("cpu", 8.0, 3.0, 0.25, 7, True), {}),
        (("cpu",), {"init_scale": 8.0, "growth_interval": 7}),
        (("cpu", 8.0), {"growth_interval": 7}),
        (("cpu", 8.0), {"enabled": False}),
    ],
)
def test_a_scaler_has_torchs_numbers(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    ours, theirs = (kind(*arguments, **named) for kind in (xamp.GradScaler, torch.amp.GradScaler))
    assert ours.get_scale() == theirs.get_scale()
    assert ours.is_enabled() == theirs.is_enabled()
    for name in () if not ours.is_enabled() else ("get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name


@pytest.mark.parametrize(
    ("arguments", "named", "dtype"),
    [
        (("cpu",), {}, torch.bfloat16),
        ((), {"device_type": "cpu"}, torch.bfloat16),
        (("cpu", torch.float16), {}, torch.float16),
        (("cpu", torch.float16, False), {}, torch.float32),
        (("cpu", None, True, False), {}, torch.bfloat16),
        (("cpu",), {"dtype": torch.float16, "enabled": True}, torch.float16),
        (("cpu",), {"enabled": False}, torch.float32),
        ((), {}, torch.float16),
        ((True, torch.bfloat16), {}, torch.bfloat16),
        (("True",), {}, torch.float16),
    ],
)
@pytest.mark.parametrize("form", ["block", "decorator", "compiled"])
def test_a_block_has_torchs_dtype(
    arguments: tuple[Any, ...], named: dict[str, Any], dtype: torch.dtype, form: str
) -> None:
    compiling.forget()

    def product(x: torch.Tensor) -> torch.Tensor:
        with xamp.autocast(*arguments, **named):
            return x @ x

    if form == "block":
        assert product(X).dtype is dtype
    elif form == "compiled":
        assert torch.compile(product, backend="eager", fullgraph=True)(X).dtype is dtype
    else:
        assert xamp.autocast(*arguments, **named)(lambda x: x @ x)(X).dtype is dtype
    if "cpu" in arguments or named:
        assert (
            torch.autocast("cpu", *arguments[1:], **{k: v for k, v in named.items() if k != "device_type"})(
                lambda x: x @ x
            )(X).dtype
            is dtype
        )


def test_torchs_own_default_is_followed() -> None:
    before = torch.get_autocast_dtype("cpu")
    block = xamp.autocast("cpu")
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        with block:
            assert (X @ X).dtype is torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)
    with block:
        assert (X @ X).dtype is torch.bfloat16


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("xpu:0"), "npu"])
def test_another_device_is_refused_by_both_names(device: Any) -> None:
    kind = str(device).partition(":")[0]
    message = rf"the device in use is 'cpu', and '{kind}' is another one\. Leave the device out.*XAMP_DEVICE={kind}"
    with pytest.raises(PolicyError, match=message):
        xamp.GradScaler(device)
    with pytest.raises(PolicyError, match=message):
        xamp.GradScaler(device=device)
    with pytest.raises(PolicyError, match=message), xamp.autocast(device):
        pass
    with pytest.raises(PolicyError, match=message), xamp.autocast(device_type=device, enabled=False):
        pass
    assert xamp.GradScaler(device, enabled=False).get_scale() == 1.0


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(PolicyError, match="names a device twice"):
        xamp.GradScaler("cpu", device="cpu")
    with pytest.raises(PolicyError, match="names a device twice"):
        xamp.autocast("cpu", device_type="cpu")
    with pytest.raises(PolicyError, match="is no device type"), xamp.autocast(device_type=3):
        pass
    with pytest.raises(PolicyError, match="init_scale='65536x'"):
        xamp.GradScaler("65536x")
    with pytest.raises(TypeError):
        xamp.autocast("cpu", None, True, False, None, 1)
