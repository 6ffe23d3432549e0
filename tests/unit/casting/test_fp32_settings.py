"""Level O0 warns of what makes it other than plain fp32, and ``exact_fp32`` undoes what takes digits, and itself.

Covers: xamp.casting.exact_fp32.
"""

from __future__ import annotations

import logging
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.backends import cudnn_rnn
from xamp.backends.cpu import CpuBackend
from xamp.backends.cuda import CudaBackend
from xamp.contract import BackendSpec, Setting
from xamp.errors import BackendUnavailable, PolicyError, UnsupportedPolicy
from xamp.registry import registry

SPEC = BackendSpec("narrow", ("cpu",), "narrow:Narrow", priority=500)
SETTINGS = (
    Setting("switch", "True", "products in fewer digits", "switch = False"),
    Setting("default", "True", "convolutions in fewer digits", "default = False", expected=True, narrows_fp32=True),
    Setting("harmless", "True", "sums in a fixed order", "harmless = False", expected=True),
)


class Narrow(CpuBackend):
    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        return SETTINGS


def warned(level: str, caplog: pytest.LogCaptureFixture, verbosity: int = 1) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "xamp"):
        xamp.initialize(nn.Linear(2, 2), level=level, verbosity=verbosity)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("narrow")
    module.Narrow = Narrow
    monkeypatch.setitem(sys.modules, "narrow", module)
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SPEC,), group=None))


@pytest.mark.usefixtures("_narrow")
def test_o0_warns_by_name_with_the_way_back(caplog: pytest.LogCaptureFixture) -> None:
    wanted = [
        "O0 on cpu: switch is True: products in fewer digits; to undo: switch = False",
        "O0 on cpu: default is True: convolutions in fewer digits; to undo: default = False",
    ]
    assert warned("O0", caplog) == wanted
    assert warned("fp32", caplog) == wanted


@pytest.mark.usefixtures("_narrow")
def test_other_levels_and_verbosity_0_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    assert warned("O4", caplog) == []
    assert warned("O0", caplog, verbosity=0) == []


def test_a_cpu_has_nothing_to_warn_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert warned("O0", caplog) == []


# --- exact_fp32: a device with switches, one of which hides another

SWITCHES = {"mode": "half", "products": True, "order": True, "variable": False}
AS_MADE = dict(SWITCHES)


def turn(name: str, value: object) -> Callable[[], Callable[[], object]]:
    def exact() -> Callable[[], object]:
        before = SWITCHES[name]
        SWITCHES[name] = value
        return lambda: SWITCHES.update({name: before})

    return exact


class Switched(CpuBackend):
    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        rows = [Setting("order", "True", "sums in a fixed order", "order = False", expected=True)]
        if SWITCHES["mode"] == "half":
            effect = "everything in float16"
            rows.append(Setting("mode", "half", effect, "mode = full", narrows_fp32=True, exact=turn("mode", "full")))
        elif SWITCHES["products"]:
            effect, exact = "products in fewer digits", turn("products", False)
            rows.append(Setting("products", "True", effect, "products = False", expected=True, exact=exact))
        if SWITCHES["variable"]:
            rows.append(Setting("VARIABLE (environment)", "1", "fewer digits", "unset VARIABLE", narrows_fp32=True))
        return rows


@pytest.fixture
def _switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = types.ModuleType("narrow")
    module.Narrow = Switched
    monkeypatch.setitem(sys.modules, "narrow", module)
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SPEC,), group=None))
    yield
    SWITCHES.update(AS_MADE)


@pytest.mark.usefixtures("_switched")
def test_what_takes_digits_is_set_back_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warned("O0", caplog)
    assert line.endswith("; to undo: mode = full, or xamp.exact_fp32()")
    exact = xamp.exact_fp32("cpu")
    assert exact.changed == ("mode", "products"), "the second shows once the first is done"
    assert repr(exact) == "<exact_fp32, changed: mode, products>"
    assert {**AS_MADE, "mode": "full", "products": False} == SWITCHES
    assert warned("O0", caplog) == []
    exact.close()
    assert SWITCHES == AS_MADE
    SWITCHES["mode"] = "other"
    exact.close()
    assert SWITCHES["mode"] == "other", "what was set back is not set back again"


@pytest.mark.usefixtures("_switched")
def test_as_a_context_manager_it_ends_with_its_block_and_with_an_error_in_it() -> None:
    def fails() -> None:
        with xamp.exact_fp32("cpu"):
            assert SWITCHES["mode"] == "full"
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert SWITCHES == AS_MADE
    with xamp.exact_fp32("cpu"), xamp.exact_fp32("cpu") as inner:
        assert inner.changed == ()
        assert repr(inner) == "<exact_fp32, changed: nothing>"


@pytest.mark.usefixtures("_switched")
def test_what_no_program_can_change_is_refused_by_name_and_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCHES["variable"] = True
    with pytest.raises(UnsupportedPolicy) as raised:
        xamp.exact_fp32("cpu")
    assert str(raised.value) == (
        "exact_fp32('cpu'): VARIABLE (environment) is 1, and a program cannot change it: fewer digits. To undo: unset "
        "VARIABLE."
    )
    assert {**AS_MADE, "variable": True} == SWITCHES


@pytest.mark.usefixtures("_switched")
def test_a_switch_that_does_not_turn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Setting("stuck", "True", "fewer digits", "stuck = False", exact=lambda: dict)
    monkeypatch.setattr(Switched, "precision_settings", lambda self, device: [stuck])
    with pytest.raises(UnsupportedPolicy, match="stuck is True, and setting it back changes nothing"):
        xamp.exact_fp32("cpu")


def test_what_is_no_device_is_refused() -> None:
    for wrong in ("gpu0", 1.5, object()):
        with pytest.raises(PolicyError, match=r"exact_fp32\(.*\): must be a device, such as 'cpu'"):
            xamp.exact_fp32(wrong)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable):
        xamp.exact_fp32("xla")


# --- torch's switches, which a build of torch has without the devices

GROUPS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
needs_both_spellings = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has the old spelling alone"
)


def values() -> dict[str, object]:
    """Of every spelling; None where torch refuses to say."""
    found: dict[str, object] = {group: precision(group) for group in GROUPS}
    for name, read in (
        ("products", torch.get_float32_matmul_precision),
        ("convolutions", lambda: torch.backends.cudnn.allow_tf32),
    ):
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = None
    return found


def precision(group: str) -> str:
    return str(operator.attrgetter(f"{group}.fp32_precision")(torch.backends))


def set_precision(group: str, value: str) -> None:
    operator.attrgetter(group)(torch.backends).fp32_precision = value


@pytest.fixture
def _torch_as_it_was() -> Iterator[None]:
    before = values()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for group in GROUPS:
        if precision(group) != before[group]:
            set_precision(group, str(before[group]))
    assert values() == before


SPOKEN: dict[str, Callable[[], object]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "new": lambda: set_precision("cuda.matmul", "tf32"),
    "new, one of two": lambda: set_precision("cudnn.conv", "ieee"),
    "new over old": lambda: [call() for call in (SPOKEN["high"], SPOKEN["new"])],
}


@needs_both_spellings
@pytest.mark.usefixtures("_torch_as_it_was")
@pytest.mark.parametrize("spoken", SPOKEN)
def test_a_gpu_s_tf32_is_turned_off_and_on_again(spoken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=8, minor=0))
    monkeypatch.setattr(cudnn_rnn, "has_bf16", lambda device: True)  # test_cudnn_rnn.py asks for these
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    spec = next(spec for spec in registry.BUILT_INS if spec.name == "cuda")
    backend = CudaBackend(spec)
    monkeypatch.setattr(registry, "resolve", lambda name, kind: backend)
    SPOKEN[spoken]()
    before = values()
    shown = [row.name for row in backend.precision_settings(torch.device("cuda"))]
    assert ("torch.backends.cuda.matmul.allow_tf32" in shown) == (spoken != "new, one of two")
    with xamp.exact_fp32("cuda") as exact:
        assert all(precision(group) in ("ieee", "none") for group in GROUPS[:3])
        assert "torch.backends.cudnn.allow_tf32" in exact.changed
        assert not any(row.exact for row in backend.precision_settings(torch.device("cuda")))
    assert values() == before
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UnsupportedPolicy, match=r"NVIDIA_TF32_OVERRIDE \(environment\) is 1, and a program cannot"):
        xamp.exact_fp32("cuda")
    assert values() == before


@needs_both_spellings
@pytest.mark.usefixtures("_torch_as_it_was")
@pytest.mark.parametrize("group", GROUPS[3:])
def test_a_cpu_s_lower_precision_is_warned_of_and_turned_off(
    group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        monkeypatch.delenv(name, raising=False)
    set_precision(group, "bf16")
    (line,) = warned("O0", caplog)
    name = f"torch.backends.{group}.fp32_precision"
    assert line.startswith(f"O0 on cpu: {name} is 'bf16': float32 ")
    assert line.endswith(f'; to undo: {name} = "ieee", or xamp.exact_fp32()')
    before = values()
    with xamp.exact_fp32("cpu") as exact:
        assert exact.changed == (name,)
        assert precision(group) == "ieee"
        assert warned("O0", caplog) == []
    assert values() == before


@needs_both_spellings
@pytest.mark.usefixtures("_torch_as_it_was")
def test_torch_s_own_matmul_precision_goes_with_it() -> None:
    torch.set_float32_matmul_precision("medium")
    before = values()
    with xamp.exact_fp32("cpu"):
        assert torch.get_float32_matmul_precision() == "highest", "both spellings agree, or torch refuses to say"
    assert values() == before
    assert torch.get_float32_matmul_precision() == "medium"
