"""xamp.accel on whatever device is in use: its names, where its calls go, what it refuses.

Covers: xamp.accel.*, xamp.values.accel_names.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from forked_python import python
from lanes import Lane

import xamp
from xamp import accel
from xamp.accel import used_device
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.registry import device_in_use
from xamp.registry.registry import Registry

# What training scripts call of torch.cuda, most used first, and what they are likely to call beside that.
# fmt: off
COUNTED = [
    "set_device", "is_available", "device_count", "synchronize", "empty_cache", "manual_seed_all", "manual_seed",
    "max_memory_allocated", "current_device", "Stream", "stream", "memory_reserved", "current_stream",
    "get_rng_state", "set_rng_state", "is_bf16_supported", "memory_cached", "Event", "random.get_rng_state",
    "random.get_rng_state_all", "random.set_rng_state", "random.set_rng_state_all", "nvtx.range_pop",
    "nvtx.range_push", "cudart", "get_device_capability",
]
LIKELY = [
    "memory_allocated", "max_memory_reserved", "max_memory_cached", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats", "memory_stats",
    "memory_summary", "memory_snapshot", "mem_get_info", "set_per_process_memory_fraction", "get_rng_state_all",
    "set_rng_state_all", "seed", "seed_all", "initial_seed", "get_device_name", "get_device_properties", "device",
    "device_of", "default_stream", "set_stream", "StreamContext", "init", "is_initialized", "ipc_collect",
    "can_device_access_peer", "get_arch_list", "is_current_stream_capturing", "is_tf32_supported",
    "OutOfMemoryError", "nvtx.range", "nvtx.mark", "nvtx.range_start", "nvtx.range_end", "random.manual_seed",
    "random.manual_seed_all", "random.seed", "random.initial_seed", "memory.max_memory_allocated",
    "memory.memory_allocated", "memory.empty_cache",
]
# fmt: on


def named(path: str, root: Any = accel) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


@pytest.fixture(autouse=True)
def _found_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_device, "_last", None)
    monkeypatch.setattr(used_device, "_made_current", None)


# --- the names


@pytest.mark.parametrize("path", [*COUNTED, *LIKELY])
def test_every_name_is_there(path: str) -> None:
    assert named(path) is not None


def test_the_list_of_names_is_whole() -> None:
    tops = {"amp", *(path.partition(".")[0] for path in [*COUNTED, *LIKELY])}
    assert set(accel.__all__) == tops
    assert set(accel.__all__) <= set(dir(accel))
    for part in (accel.random, accel.memory, accel.nvtx):
        assert all(hasattr(part, name) for name in part.__all__)
    assert {getattr(accel, name) for name in accel.random.__all__} == {
        getattr(accel.random, name) for name in accel.random.__all__
    }
    assert {getattr(accel, name) for name in accel.memory.__all__} == {
        getattr(accel.memory, name) for name in accel.memory.__all__
    }


def described(function: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.kind) for name, parameter in inspect.signature(function).parameters.items()]


CALLED = [path for path in [*COUNTED, *LIKELY] if path != "OutOfMemoryError"]


@pytest.mark.parametrize("path", CALLED)
def test_the_arguments_are_those_of_torch_cuda(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    ours, theirs = described(named(path)), described(named(path, torch.cuda))
    assert ours[: len(theirs)] == theirs  # an older torch may have fewer at the end
    further = list(inspect.signature(named(path)).parameters.values())[len(theirs) :]
    assert all(parameter.default is not parameter.empty for parameter in further)


@pytest.mark.parametrize("path", CALLED)
def test_what_may_be_left_out_is_that_of_torch_cuda(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    optional = [
        {name for name, one in inspect.signature(each).parameters.items() if one.default is not one.empty}
        for each in (named(path), named(path, torch.cuda))
    ]
    assert optional[0] >= optional[1]
    assert optional[0] - optional[1] <= {"external", "mempool_id", "include_traces"}


@pytest.mark.parametrize(
    "path",
    [
        *("Stream.wait_stream", "Stream.wait_event", "Stream.record_event", "Stream.query", "Stream.synchronize"),
        *("Event.record", "Event.wait", "Event.query", "Event.synchronize", "Event.elapsed_time"),
    ],
)
def test_the_methods_take_what_those_of_torch_cuda_take(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    assert described(named(path)) == described(named(path, torch.cuda))


def test_it_is_reached_in_both_ways_and_imported_late() -> None:
    code = "import sys, xamp; assert not [name for name in sys.modules if name.startswith('xamp.')]; "
    code += "xamp.accel.synchronize(); from xamp import accel as a; assert a is xamp.accel; a.set_device(0)"
    done = subprocess.run([python(), "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert xamp.accel is accel


# --- a stand-in accelerator: two cards of type "meta", which every torch knows and no built-in serves


class Recorder(types.ModuleType):
    """A device's module that notes each call; ``lacking`` names are not there."""

    def __init__(self, lacking: Sequence[str] = (), **answers: Any) -> None:
        super().__init__("torch.acme")
        self.calls: list[tuple[Any, ...]] = []
        for name in {*FUNCTIONS} - {*lacking}:
            setattr(self, name, self._noting(name, answers.get(name)))
        for name in {"Stream", "Event", "StreamContext", "device", "device_of"} - {*lacking}:
            setattr(self, name, type(name, (), {}))

    def _noting(self, name: str, answer: Any) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.items()))
            return answer

        return noted


FUNCTIONS = {path for path in [*COUNTED, *LIKELY] if "." not in path} - {
    *("Stream", "Event", "StreamContext", "device", "device_of", "OutOfMemoryError", "is_available"),
    *("is_bf16_supported", "memory_cached", "max_memory_cached", "reset_max_memory_allocated"),
    "reset_max_memory_cached",
}


class Cards(Backend):
    made: Recorder
    names: tuple[str, ...] = ("First", "Second")

    def devices(self) -> Sequence[str]:
        return self.names

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(dtypes=("float16", "bfloat16"), fast_dtypes=("float16",))

    def runtime(self, device_type: str) -> Any:
        assert device_type == "meta"
        return self.made


class Plain(Backend):
    """Says nothing of a runtime."""


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    """Put an accelerator into the machine: ``cards(lacking=["Stream"], names=("Only",), current_device=1)``."""
    monkeypatch.delenv("XAMP_DEVICE", raising=False)
    monkeypatch.delenv("XAMP_BACKEND", raising=False)
    module = types.ModuleType("xamp_test_cards")
    vars(module).update(Cards=Cards, Plain=Plain)
    monkeypatch.setitem(sys.modules, "xamp_test_cards", module)

    def put(
        names: tuple[str, ...] = ("First", "Second"), lacking: Sequence[str] = (), cls: str = "Cards", **answers: Any
    ) -> Recorder:
        runtime = Recorder(lacking, **{"device_count": len(names), **answers})
        monkeypatch.setattr(Cards, "made", runtime, raising=False)
        monkeypatch.setattr(Cards, "names", names)
        specs = [
            BackendSpec("cpu", ("cpu",), "xamp.backends.cpu:CpuBackend"),
            BackendSpec("acme", ("meta",), f"xamp_test_cards:{cls}", priority=9),
        ]
        registry = Registry(specs, group=None)
        monkeypatch.setattr(device_in_use, "REGISTRY", registry)
        return runtime

    return put


STATE = torch.zeros(16, dtype=torch.uint8)
CALLS: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (("synchronize",), ("synchronize",)),
    (("synchronize", 1), ("synchronize", 1)),
    (("set_device", 1), ("set_device", 1)),
    (("set_device", "meta:1"), ("set_device", "meta:1")),
    (("set_device", torch.device("meta", 1)), ("set_device", torch.device("meta", 1))),
    (("set_device", -1), ("set_device", -1)),
    (("empty_cache",), ("empty_cache",)),
    (("ipc_collect",), ("ipc_collect",)),
    (("init",), ("init",)),
    (("manual_seed", 7), ("manual_seed", 7)),
    (("manual_seed_all", 7), ("manual_seed_all", 7)),
    (("seed",), ("seed",)),
    (("seed_all",), ("seed_all",)),
    (("get_rng_state",), ("get_rng_state",)),
    (("get_rng_state", 1), ("get_rng_state", 1)),
    (("get_rng_state_all",), ("get_rng_state_all",)),
    (("set_rng_state", STATE), ("set_rng_state", STATE)),
    (("set_rng_state", STATE, "meta:1"), ("set_rng_state", STATE, "meta:1")),
    (("set_rng_state_all", [STATE]), ("set_rng_state_all", [STATE])),
    (("reset_peak_memory_stats", 1), ("reset_peak_memory_stats", 1)),
    (("reset_max_memory_allocated",), ("reset_peak_memory_stats",)),
    (("reset_max_memory_cached", 1), ("reset_peak_memory_stats", 1)),
    (("reset_accumulated_memory_stats",), ("reset_accumulated_memory_stats",)),
    (("memory_snapshot",), ("memory_snapshot",)),
    (("memory_snapshot", (0, 1)), ("memory_snapshot", (0, 1))),
    (("memory_snapshot", None, False), ("memory_snapshot", None, False)),
    (("memory_summary", 1, True), ("memory_summary", 1, True)),
    (("set_per_process_memory_fraction", 0.5), ("set_per_process_memory_fraction", 0.5)),
    (("set_per_process_memory_fraction", 0.5, 1), ("set_per_process_memory_fraction", 0.5, 1)),
    (("can_device_access_peer", 0, 1), ("can_device_access_peer", 0, 1)),
    (("current_stream", 1), ("current_stream", 1)),
    (("default_stream",), ("default_stream",)),
    (("stream", None), ("stream", None)),
    (("set_stream", "a stream"), ("set_stream", "a stream")),
    (("cudart",), ("cudart",)),
]


@pytest.mark.parametrize(("call", "arrives"), CALLS, ids=lambda one: "-".join(map(str, one))[:40])
def test_a_call_goes_to_the_device_in_use(
    cards: Callable[..., Recorder], call: tuple[Any, ...], arrives: tuple[Any, ...]
) -> None:
    runtime = cards()
    getattr(accel, call[0])(*call[1:])
    got = [one for one in runtime.calls if one[0] != "device_count"]
    assert len(got) == 1
    assert len(got[0]) == len(arrives)
    assert all(a is b or a == b for a, b in zip(got[0], arrives, strict=True))


FIGURES: list[tuple[str, str, Any, Any]] = [
    ("device_count", "device_count", 2, 2),
    ("current_device", "current_device", 1, 1),
    ("initial_seed", "initial_seed", 11, 11),
    ("memory_allocated", "memory_allocated", 12, 12),
    ("max_memory_allocated", "max_memory_allocated", 13, 13),
    ("memory_reserved", "memory_reserved", 14, 14),
    ("memory_cached", "memory_reserved", 14, 14),
    ("max_memory_reserved", "max_memory_reserved", 15, 15),
    ("max_memory_cached", "max_memory_reserved", 15, 15),
    ("mem_get_info", "mem_get_info", [16, 17], (16, 17)),
    ("memory_stats", "memory_stats", {"a": 1}, {"a": 1}),
    ("get_device_name", "get_device_name", "Acme", "Acme"),
    ("get_device_properties", "get_device_properties", "all", "all"),
    ("get_device_capability", "get_device_capability", (9, 0), (9, 0)),
    ("get_device_capability", "get_device_capability", {"supported_dtypes": ()}, (0, 0)),
    ("get_device_capability", "get_device_capability", None, (0, 0)),
    ("get_arch_list", "get_arch_list", ("a1",), ["a1"]),
    ("is_initialized", "is_initialized", False, False),
    ("is_tf32_supported", "is_tf32_supported", True, True),
    ("is_current_stream_capturing", "is_current_stream_capturing", True, True),
    ("get_rng_state", "get_rng_state", STATE, STATE),
]


@pytest.mark.parametrize(("name", "of", "answer", "result"), FIGURES)
def test_an_answer_is_that_of_the_device_in_use(
    cards: Callable[..., Recorder], name: str, of: str, answer: Any, result: Any
) -> None:
    cards(**{of: answer})
    found = getattr(accel, name)()
    assert found is result or (found == result and type(found) is type(result))


def test_what_is_not_asked_of_the_device_s_module(cards: Callable[..., Recorder]) -> None:
    runtime = cards()
    assert accel.is_available() is True
    assert accel.is_bf16_supported() is True  # declared
    assert accel.is_bf16_supported(including_emulation=False) is False  # not fast there
    assert accel.is_bf16_supported(False) is False
    assert runtime.calls == []
    assert accel.OutOfMemoryError is torch.OutOfMemoryError


@pytest.mark.parametrize("name", ["Stream", "Event", "StreamContext", "device", "device_of"])
def test_classes_are_the_device_s_own(cards: Callable[..., Recorder], name: str) -> None:
    runtime = cards()
    assert getattr(accel, name) is getattr(runtime, name)
    assert isinstance(getattr(runtime, name)(), getattr(accel, name))


def test_nvtx_is_the_device_s_own(cards: Callable[..., Recorder]) -> None:
    noted: list[Any] = []
    runtime = cards()

    def noting(answer: int) -> Callable[[str], int]:
        return lambda msg: (noted.append(msg), answer)[1]  # type: ignore[func-returns-value]

    vars(runtime)["nvtx"] = types.SimpleNamespace(
        range_push=noting(4),
        range_pop=lambda: 3,
        range_start=noting(2),
        range_end=noted.append,
        mark=noted.append,
    )
    assert accel.nvtx.range_push("a") == 4
    assert accel.nvtx.range_pop() == 3
    assert accel.nvtx.range_start("b") == 2
    accel.nvtx.range_end(2)
    accel.nvtx.mark("c")
    with accel.nvtx.range("step {}", 5):
        pass
    assert noted == ["a", "b", 2, "c", "step 5"]


def test_any_other_name_is_looked_up_in_the_device_s_module(cards: Callable[..., Recorder]) -> None:
    runtime = cards()
    vars(runtime).update(AcmeGraph=int, memory=types.SimpleNamespace(record=str), _sleep=float)
    assert accel.AcmeGraph is int
    assert accel._sleep is float
    assert accel.memory.record is str


def test_a_name_that_is_nowhere_names_the_device_and_names_like_it(cards: Callable[..., Recorder]) -> None:
    vars(cards()).update(AcmeGraph=int)
    with pytest.raises(
        AttributeError, match=r"xamp\.accel has no 'AcmeGraf' on the device in use, of type 'meta'.*AcmeGraph\?"
    ):
        _ = accel.AcmeGraf
    with pytest.raises(AttributeError, match=r"no 'synchronise' .* Did you mean synchronize\?"):
        _ = accel.synchronise
    with pytest.raises(AttributeError, match=r"xamp\.accel\.memory has no 'recrd' on the device in use"):
        _ = accel.memory.recrd
    vars(used_device.in_use().runtime)["__wrapped__"] = (
        int  # what inspect asks of anything is not the device's business
    )
    assert not hasattr(accel, "__wrapped__")


# --- names that an accelerator's module lacks

ONE = ("Only",)  # like torch.mps: one index, one queue, few names
FEW = sorted(FUNCTIONS - {"synchronize", "manual_seed", "seed", "get_rng_state", "set_rng_state", "empty_cache"})
FEW += ["Stream", "Event", "StreamContext", "device", "device_of"]


def test_with_one_index_the_rest_is_neutral(cards: Callable[..., Recorder]) -> None:
    runtime = cards(names=ONE, lacking=FEW, get_rng_state=STATE)
    accel.set_device(0)
    accel.set_device("meta:0")
    assert accel.current_device() == 0
    assert accel.device_count() == 1
    assert accel.get_device_name() == "Only"
    assert accel.get_device_capability() == (0, 0)
    assert accel.get_arch_list() == []
    assert accel.can_device_access_peer(0, 0) is False
    assert accel.is_initialized() is True
    assert accel.is_tf32_supported() is False
    assert accel.is_current_stream_capturing() is False
    accel.init()
    accel.ipc_collect()
    with accel.device(0), accel.device_of(torch.ones(1)):
        pass
    assert runtime.calls == []
    accel.manual_seed_all(5)
    accel.seed_all()
    assert accel.get_rng_state_all()[0] is STATE
    accel.set_rng_state_all([STATE])
    assert runtime.calls == [("manual_seed", 5), ("seed",), ("get_rng_state",), ("set_rng_state", STATE)]


def test_a_module_without_indices_is_passed_none(cards: Callable[..., Recorder]) -> None:
    runtime = cards(names=ONE, lacking=FEW)
    accel.synchronize(0)
    accel.synchronize("meta")
    accel.get_rng_state("meta:0")
    accel.set_rng_state(STATE, 0)
    assert runtime.calls == [("synchronize",), ("synchronize",), ("get_rng_state",), ("set_rng_state", STATE)]
    with pytest.raises(
        xamp.BackendUnavailable, match=r"^accel.synchronize\(1\): there is no meta:1\. There are meta:0"
    ):
        accel.synchronize(1)


def test_neutral_streams_and_events_wait_for_the_device(cards: Callable[..., Recorder]) -> None:
    runtime = cards(names=ONE, lacking=[*FEW, "Stream"])
    vars(runtime).update(Event=int)  # cannot be recorded in a stream that is not there
    stream = accel.Stream()
    assert accel.Event.__module__ == "xamp.accel.streams"
    assert stream.device == torch.device("meta", 0)
    with accel.stream(stream):
        assert accel.current_stream() is stream
    assert accel.current_stream() is accel.default_stream()
    assert runtime.calls == []
    stream.synchronize()
    assert stream.query() is True
    untimed = stream.record_event()
    assert runtime.calls == [("synchronize",)] * 2
    accel.current_stream().wait_event(untimed)
    accel.current_stream().wait_stream(stream)
    untimed.wait()
    assert runtime.calls == [("synchronize",)] * 2
    untimed.synchronize()
    assert untimed.query() is True
    timed = accel.Event(enable_timing=True)
    timed.record()
    assert runtime.calls == [("synchronize",)] * 5


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("synchronize", ()),
        ("memory_allocated", ()),
        ("max_memory_allocated", ()),
        ("memory_reserved", ()),
        ("memory_cached", ()),
        ("memory_stats", ()),
        ("memory_summary", ()),
        ("memory_snapshot", ()),
        ("mem_get_info", ()),
        ("reset_peak_memory_stats", ()),
        ("set_per_process_memory_fraction", (0.5,)),
        ("get_device_properties", ()),
        ("initial_seed", ()),
        ("manual_seed", (1,)),
        ("manual_seed_all", (1,)),
        ("get_rng_state_all", ()),
        ("cudart", ()),
    ],
)
def test_what_has_no_neutral_answer_is_an_error_and_no_wrong_number(
    cards: Callable[..., Recorder], name: str, args: tuple[Any, ...]
) -> None:
    cards(names=ONE, lacking=sorted(FUNCTIONS))
    with pytest.raises(
        xamp.UnsupportedPolicy,
        match=r"^accel\.\w+\(\): the device in use is of type 'meta', torch\.acme has no \w+, and no neutral answer",
    ):
        getattr(accel, name)(*args)


def test_a_wait_that_cannot_be_is_an_error(cards: Callable[..., Recorder]) -> None:
    cards(names=ONE, lacking=[*FUNCTIONS, "Stream"])
    with pytest.raises(xamp.UnsupportedPolicy, match="has no synchronize"):
        accel.Stream().synchronize()


@pytest.mark.parametrize("name", ["current_device", "can_device_access_peer", "default_stream", "manual_seed_all"])
def test_with_several_indices_or_queues_nothing_is_guessed(cards: Callable[..., Recorder], name: str) -> None:
    cards(lacking=[name])
    args = {"can_device_access_peer": (0, 1), "manual_seed_all": (1,)}.get(name, ())
    with pytest.raises(xamp.UnsupportedPolicy, match=rf"has no {name}"):
        getattr(accel, name)(*args)


def test_the_module_s_count_goes_before_the_backend_s_list(cards: Callable[..., Recorder]) -> None:
    runtime = cards(lacking=["manual_seed_all"], device_count=1)
    accel.manual_seed_all(4)
    assert ("manual_seed", 4) in runtime.calls


def test_a_name_comes_from_the_backend_where_the_module_has_none(cards: Callable[..., Recorder]) -> None:
    cards(lacking=["get_device_name"], current_device=1)
    assert accel.get_device_name() == "Second"
    assert accel.get_device_name(0) == "First"
    assert accel.get_device_name("meta:1") == "Second"


def test_a_summary_is_made_of_the_figures_where_the_module_has_none(cards: Callable[..., Recorder]) -> None:
    cards(
        lacking=["memory_summary"],
        memory_allocated=2**20,
        max_memory_allocated=2**21,
        memory_reserved=2**22,
        max_memory_reserved=5 * 2**20,
    )
    header, used, held = accel.memory_summary().splitlines()
    assert header.split() == ["MiB", "now", "peak"]
    assert used.split()[2:] == ["1.0", "2.0"]
    assert held.split()[1:] == ["4.0", "5.0"]


def test_a_backend_without_a_runtime_is_an_error_that_says_what_to_write(cards: Callable[..., Recorder]) -> None:
    cards(cls="Plain")
    with pytest.raises(
        xamp.BackendUnavailable, match=r"^xamp\.accel on device type 'meta': backend 'acme' has no runtime: "
    ) as e:
        accel.synchronize()
    assert str(e.value).endswith("must override Backend.runtime, see xamp.contract.")


def test_the_default_runtime_is_torch_s_module() -> None:
    spec = BackendSpec("plain", ("xpu", "cpu"), "a:B")
    assert Backend(spec).runtime("cpu") is torch.cpu
    assert Backend(spec).runtime("xpu") is torch.xpu


def test_apple_s_figures_go_by_torch_cuda_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from xamp.backends.mps import MpsBackend

    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4)
    runtime = MpsBackend(BackendSpec("mps", ("mps",), "a:B")).runtime("mps")
    assert (runtime.memory_allocated(), runtime.memory_reserved()) == (3, 4)
    assert runtime.synchronize is torch.mps.synchronize
    assert not hasattr(runtime, "max_memory_allocated")
    assert not hasattr(runtime, "set_device")


# --- which device


def test_the_variable_is_read_at_every_call(cards: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cards()
    accel.synchronize()
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    accel.synchronize()
    assert accel.is_available() is False
    monkeypatch.delenv("XAMP_DEVICE")
    accel.empty_cache()
    assert runtime.calls == [("synchronize",), ("empty_cache",)]


def test_a_backend_registered_later_is_seen(cards: Callable[..., Recorder]) -> None:
    runtime = cards()
    accel.synchronize()
    later = types.ModuleType("torch.later")
    noted: list[str] = []
    vars(later).update(synchronize=lambda: noted.append("later"), set_device=print)
    vars(device_in_use)["REGISTRY"].register(BackendSpec("later", ("meta",), "xamp_test_cards:Cards", priority=99))
    Cards.made = later  # type: ignore[assignment]  # the fixture puts the old one back
    accel.synchronize()
    assert (runtime.calls, noted) == ([("synchronize",)], ["later"])


def test_the_backend_that_the_environment_names_is_asked(
    cards: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards()
    accel.synchronize()
    monkeypatch.setenv("XAMP_BACKEND", "cpu")
    with pytest.raises(xamp.BackendUnavailable, match=r"^XAMP_BACKEND='cpu'.*serves cpu, not 'meta'"):
        accel.synchronize()


def test_an_index_in_the_variable_becomes_the_current_device_once(
    cards: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cards()
    monkeypatch.setenv("XAMP_DEVICE", "meta:1")
    accel.synchronize()
    accel.set_device(0)
    accel.synchronize()
    vars(device_in_use)["REGISTRY"].register(BackendSpec("other", ("xpu",), "a:B"))
    accel.synchronize()
    assert [call for call in runtime.calls if call[0] != "device_count"] == [
        ("set_device", 1),
        ("synchronize",),
        ("set_device", 0),
        ("synchronize",),
        ("synchronize",),
    ]


def test_a_device_without_an_index_is_the_current_one_and_stays_it(cards: Callable[..., Recorder]) -> None:
    runtime = cards()
    accel.set_device(None)
    accel.set_device("meta")
    accel.set_device(xamp.device())
    assert runtime.calls == []


# fmt: off
NAMES = [
    "set_device", "synchronize", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_cached", "memory_stats", "memory_summary", "mem_get_info",
    "reset_peak_memory_stats", "current_stream", "default_stream", "get_device_name", "get_device_properties",
    "get_device_capability", "get_rng_state",
]
# fmt: on
TAKERS: dict[str, tuple[Any, ...]] = dict.fromkeys(NAMES, ())
TAKERS.update(set_rng_state=(STATE,), set_per_process_memory_fraction=(0.5,))


@pytest.mark.parametrize("name", sorted(TAKERS))
@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        (
            "xpu:1",
            xamp.PolicyError,
            r"the device in use is of type 'meta'\. Pass an index \(int\), .*XAMP_DEVICE=xpu\.",
        ),
        (torch.device("cpu"), xamp.PolicyError, r"the device in use is of type 'meta'.*a device of type 'meta'"),
        ("1", xamp.PolicyError, "this is no device.*make an int of an environment variable"),
        (1.0, xamp.PolicyError, r"must be an int, a torch\.device, a str or None"),
        (True, xamp.PolicyError, r"must be an int, a torch\.device, a str or None"),
        (2, xamp.BackendUnavailable, r"there is no meta:2\. There are meta:0 \(First\), meta:1 \(Second\)\."),
        ("meta:2", xamp.BackendUnavailable, r"there is no meta:2\. There are meta:0 \(First\)"),
    ],
)
def test_what_is_no_device_of_this_type_is_refused(
    cards: Callable[..., Recorder], name: str, device: Any, error: type[Exception], text: str
) -> None:
    runtime = cards()
    echoed = r"^accel\.\w+\(" + repr(device).replace("(", r"\(").replace(")", r"\)") + r"\): "
    with pytest.raises(error, match=echoed + text):
        getattr(accel, name)(*TAKERS[name], device)
    assert [call for call in runtime.calls if call[0] != "device_count"] == []


# --- on every device there is


@pytest.fixture
def used(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The lane's device, in use."""
    monkeypatch.setenv("XAMP_DEVICE", lane.device.type)
    return lane.device


def test_here_a_state_taken_brings_the_same_numbers_back(used: torch.device) -> None:
    accel.manual_seed_all(3)
    first = torch.rand(8, device=used)
    states = accel.get_rng_state_all(), accel.random.get_rng_state()
    second = torch.rand(8, device=used)
    accel.set_rng_state_all(states[0])
    assert torch.equal(torch.rand(8, device=used), second)
    accel.random.set_rng_state(states[1])
    assert torch.equal(torch.rand(8, device=used), second)
    accel.manual_seed(3)
    assert torch.equal(torch.rand(8, device=used), first)
    assert not torch.equal(first, second)


def test_here_memory_rises_with_a_large_tensor(used: torch.device) -> None:
    torch.ones(1, device=used)
    accel.reset_peak_memory_stats()
    before = accel.memory_allocated()
    large = torch.ones(50_000_000, device=used)  # 200 MB
    accel.synchronize()
    assert accel.memory_allocated() - before >= 150_000_000
    assert accel.memory_reserved() >= 150_000_000
    del large
    accel.empty_cache()
    assert accel.max_memory_allocated() - before >= 150_000_000
    assert accel.max_memory_reserved() >= accel.max_memory_allocated() > accel.memory_allocated()
    assert 0 <= accel.mem_get_info()[0] <= accel.mem_get_info()[1]
    assert isinstance(accel.memory_summary(), str)
    assert accel.memory_stats()["allocated_bytes.all.peak"] >= 150_000_000


def test_here_an_event_times_what_lies_between(used: torch.device) -> None:
    start, end = accel.Event(enable_timing=True), accel.Event(enable_timing=True)
    before = time.perf_counter()
    start.record()
    time.sleep(0.05)
    end.record()
    accel.synchronize()
    assert 20.0 <= start.elapsed_time(end) <= 1000 * (time.perf_counter() - before)
    assert end.query()


def test_here_work_of_another_stream_is_waited_for(used: torch.device) -> None:
    side = accel.Stream()
    with accel.stream(side):
        assert accel.current_stream() == side
        made = torch.full((1000,), 2.0, device=used)
    accel.current_stream().wait_stream(side)
    made.record_stream(accel.current_stream())
    assert made.sum().item() == 2000.0
    assert accel.current_stream() == accel.default_stream()


def test_here_what_it_says_of_the_device_is_consistent(lane: Lane, used: torch.device) -> None:
    assert accel.is_available() is (used.type != "cpu")
    assert accel.device_count() == len(lane.backend.devices())
    assert 0 <= accel.current_device() < accel.device_count()
    assert accel.get_device_name(0)
    assert accel.get_device_properties(0).total_memory > 2**28
    assert accel.get_device_properties(0).multi_processor_count >= 1
    assert accel.is_bf16_supported() is ("bfloat16" in lane.can.dtypes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some devices say that the numbers are made up
        major, minor = accel.get_device_capability()
    assert major >= 0
    assert minor >= 0
    accel.set_device(0)
    with accel.device(0):
        assert accel.current_device() == 0


def test_amp_is_xamp() -> None:
    assert accel.amp is xamp
