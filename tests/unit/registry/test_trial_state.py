"""What a trial finds out is of the device: whatever the caller has set, and whatever happens at that moment.

Covers: xamp.registry.device_trials, xamp.registry.trials, xamp.registry.fused_classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refusing import Refusing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

import xamp
from xamp.backends.cpu import CpuBackend
from xamp.doctor.declared import find_mismatches
from xamp.errors import StateError
from xamp.policy import LEVELS
from xamp.registry import device_trials, fused_classes, registry
from xamp.registry.causes import NotNow
from xamp.registry.trials import defect_of
from xamp.torch_compat import torch_features

CPU = torch.device("cpu")
FORMS = ("Adagrad", "Adam", "AdamW", "SGD")


@pytest.fixture(autouse=True)
def _untried() -> Iterator[None]:
    """Nothing is known of the fused implementations, before the test and after it."""

    def forget() -> None:
        fused_classes.is_right.cache_clear()
        fused_classes.fused_refusal.cache_clear()

    forget()
    yield
    forget()


def new_backend() -> CpuBackend:
    return CpuBackend(next(spec for spec in registry.BUILT_INS if spec.name == "cpu"))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], Any]] = {
    "the default dtype is float64": lambda: default_dtype(torch.float64),
    "the default dtype is bfloat16": lambda: default_dtype(torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_device_can_do_the_same_whatever_the_caller_has_set(state: str) -> None:
    backend = new_backend()
    with STATES[state]():
        can = backend.capabilities(CPU)
        assert (can.lacking, can.levels, can.fused_optimizers) == ((), tuple(LEVELS), FORMS)
        assert find_mismatches(backend, CPU) == []


def test_in_an_autocast_region_float32_is_tried_in_float32() -> None:
    with torch.autocast("cpu", torch.float16), Refusing("mm", torch.float16):
        can = new_backend().capabilities(CPU)
    assert [dtype for dtype, _ in can.lacking] == ["float16"]
    assert can.levels == ("O0", "O4", "O5")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_with_scaling_is_the_same_under_another_default_dtype(dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        model = nn.Linear(2, 1, dtype=torch.float32)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        xamp.initialize(model, optimizer, "O2", init_scale=8.0, verbosity=0)
        for value in (1.0, float("inf")):
            optimizer.zero_grad()
            with xamp.scale_loss(model(torch.full((1, 2), value, dtype=torch.float32)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    masters = [*xamp.master_params(optimizer)]
    assert [m.dtype for m in masters] == [torch.float32] * 2
    assert masters[0].tolist() == [[0.5, 0.5]]
    assert xamp.loss_scale(optimizer) == 4.0


class Waits:
    """A device's mode for waits, which torch would obey where the host waits."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.seen: list[Any] = []

    def get(self) -> Any:
        return self.mode

    def set(self, mode: Any) -> None:
        self.mode = mode

    def look(self, cls: Any, *_: Any) -> bool:
        self.seen.append(self.mode)
        return True


@pytest.mark.parametrize("mode", [0, 1, 2, "error"])
def test_a_trial_may_wait_where_the_caller_forbade_it(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(mode)
    monkeypatch.setattr(torch.cpu, "get_sync_debug_mode", waits.get, raising=False)
    monkeypatch.setattr(torch.cpu, "set_sync_debug_mode", waits.set, raising=False)
    monkeypatch.setattr(fused_classes, "_steps_alike", waits.look)
    assert fused_classes.is_right(AdamW, CPU, torch.float32)
    assert waits.seen == [0 if mode == 0 else "default"]
    assert waits.mode == mode


def test_while_a_graph_is_captured_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
        for ask in (
            lambda: fused_classes.is_right(AdamW, CPU, torch.float32),
            lambda: fused_classes.fused_refusal(AdamW, CPU, torch.float32, None),
            lambda: defect_of(CPU, "float32"),
        ):
            with pytest.raises(StateError, match=r"being captured on cpu.*Run at least one whole training step before"):
                ask()
    assert fused_classes.is_right(AdamW, CPU, torch.float32)
    assert fused_classes.fused_refusal(AdamW, CPU, torch.float32, None) == ""


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_full_device_says_nothing_about_its_fused_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    can = new_backend().capabilities(CPU)
    with monkeypatch.context() as pressed:
        pressed.setattr(torch, "_fused_adamw_", full)
        with pytest.raises(torch.OutOfMemoryError):
            _ = can.fused_optimizers
        model = nn.Linear(2, 1)
        optimizer = AdamW(model.parameters(), fused=True)
        with pytest.raises(torch.OutOfMemoryError):
            xamp.initialize(model, optimizer, "O1", verbosity=0)
    assert can.fused_optimizers == FORMS
    xamp.initialize(model, optimizer, "O1", fused=True, verbosity=0)


def test_a_scaler_s_first_step_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand in a stretch in which the caller forbade to wait; the first loss is scaled before."""
    monkeypatch.setattr(registry.REGISTRY, "_outcomes", {})  # a backend that nobody asked yet
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = AdamW([param], fused=True), xamp.GradScaler(init_scale=8.0)
    scaler.scale(param.sum()).backward()
    waits = Waits(0)
    monkeypatch.setattr(fused_classes, "_steps_alike", waits.look)
    scaler.step(optimizer)
    scaler.update()
    assert waits.seen == []
    assert scaler.last_step is xamp.StepOutcome.APPLIED


def test_who_compares_or_shows_capabilities_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = new_backend()
    with monkeypatch.context() as forbidden:
        forbidden.setattr(fused_classes, "_steps_alike", full)
        can = backend.capabilities(CPU)
        assert can == backend.capabilities()
        assert can in {backend.capabilities(torch.device("cpu"))}
        assert "fused_optimizers='(not tried)', overflow='inf'" in repr(can)
    assert can.fused_optimizers == FORMS
    assert f"fused_optimizers={FORMS}, overflow='inf'" in repr(can)


def test_a_device_is_asked_once_for_its_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def dtypes(_: CpuBackend, device: torch.device) -> tuple[str, ...]:
        asked.append(device)
        return ("bfloat16",)

    monkeypatch.setattr(CpuBackend, "dtypes", dtypes)
    backend = new_backend()
    assert [backend.capabilities(CPU).dtypes for _ in range(3)] == [("bfloat16",)] * 3
    assert asked == [CPU]
    assert backend.capabilities(CPU).lacking == (("float16", "the device has no arithmetic of its own for it"),)


def exported(run: Callable[[], Any]) -> None:
    """Run ``run`` while torch.export traces."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run()
            return x + 1

    program = torch.export.export(Model(), (torch.ones(2),), strict=False)
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]


def traced(run: Callable[[], Any]) -> None:
    """Run ``run`` while ``make_fx`` traces: it must leave no node."""

    def plus(x: torch.Tensor) -> torch.Tensor:
        run()
        return x + 1

    graph = make_fx(plus)(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]


def counted(run: Callable[[], Any]) -> None:
    """Run ``run`` while operations are counted: there are none."""
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == 0


def within(*contexts: Callable[[], Any]) -> Callable[[Callable[[], Any]], None]:
    def around(run: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            run()

    return around


class Halves(torch.overrides.TorchFunctionMode):
    """Makes each tensor that a factory makes a 16-bit one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.half() if isinstance(made, torch.Tensor) and made.dtype is torch.float32 else made


AROUND: dict[str, Callable[[Callable[[], Any]], None]] = {
    "export": exported,
    "make_fx": traced,
    "a counter of operations": counted,
    "fake tensors": within(FakeTensorMode),
    "a mode of functions": within(Halves),
    "inference mode": within(torch.inference_mode),
    "no gradients": within(torch.no_grad),
    "another default device": within(lambda: torch.device("meta")),
    "autocast": within(lambda: torch.autocast("cpu", torch.float16)),
    "vmap": lambda run: print(torch.func.vmap(lambda x: (run(), x + 1)[1])(torch.ones(2, 2))),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_first_use_within_a_mode_finds_what_a_new_process_finds(name: str) -> None:
    found: list[Any] = []

    def first_use() -> None:
        backend = new_backend()
        defects = [defect_of(CPU, dtype, True) for dtype in ("float32", "float16", "bfloat16")]
        can = backend.capabilities(CPU)
        found.append((defects, can.lacking, can.levels, can.fused_optimizers))

    AROUND[name](first_use)
    assert found == [(["", "", ""], (), tuple(LEVELS), FORMS)]


@pytest.mark.parametrize("name", ["make_fx", "a counter of operations", "fake tensors"])
def test_features_of_torch_are_asked_outside_of_modes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch_features, "FEATURES", dict(torch_features.FEATURES))

    @torch_features._since("0", without="nothing")
    def multiplies() -> bool:
        """The processor multiplies."""
        product = torch.mm(torch.ones(2, 2, device="cpu"), torch.ones(2, 2, device="cpu"))
        calls.append(type(product))
        return product[0, 0].item() == 2.0

    AROUND[name](lambda: [multiplies(), multiplies()])
    assert multiplies()
    assert calls == [torch.Tensor]


def test_a_trial_that_could_not_run_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trials, "disable_current_modes", contextlib.nullcontext)
    with FakeTensorMode():
        with pytest.raises(NotNow, match="tensors are made as FakeTensor here, and what cpu can do was not tried"):
            fused_classes.is_right(AdamW, CPU, torch.float32)
        with pytest.raises(NotNow):
            defect_of(CPU, "float32")
    assert fused_classes.is_right(AdamW, CPU, torch.float32)
    assert not defect_of(CPU, "float32")
