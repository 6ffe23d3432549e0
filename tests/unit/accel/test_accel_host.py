"""xamp.accel on a CPU: each name does what makes sense there, and scripts written for GPUs run.

Covers: xamp.accel.neutral, xamp.accel.streams, backends.host, backends.host_memory.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xamp
from xamp import accel
from xamp.backends import host, host_memory
from xamp.backends.cpu import CpuBackend
from xamp.backends.processor import processor_name
from xamp.contract import Capabilities

MB = 1024.0 * 1024.0


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    monkeypatch.delenv("XAMP_BACKEND", raising=False)


# --- the device


@pytest.mark.parametrize("device", [0, 3, -1, None, "cpu", "cpu:1", torch.device("cpu"), torch.device("cpu", 2)])
def test_any_index_is_the_one_device(device: Any) -> None:
    accel.set_device(device)
    accel.synchronize(device)
    assert accel.current_device() == 0
    assert accel.device_count() == 1
    assert accel.memory_allocated(device) > 0
    assert accel.get_device_name(device) == processor_name()
    with accel.device(device):
        assert torch.ones(1).device.type == "cpu"
    accel.set_device(xamp.device(3))
    assert accel.Stream(device).device == torch.device("cpu")


def test_it_is_no_accelerator() -> None:
    assert (accel.is_available(), host.is_available()) == (False, False)
    assert accel.is_initialized() is True
    assert accel.get_device_capability() == (0, 0)
    assert accel.get_arch_list() == []
    assert accel.get_gencode_flags() == ""
    assert accel.can_device_access_peer(0, 1) is False
    assert accel.is_tf32_supported() is False
    assert accel.is_current_stream_capturing() is False
    assert accel.default_generators == (torch.default_generator,)
    accel.init()
    accel.ipc_collect()
    accel.empty_cache()


def test_properties_tell_of_the_machine() -> None:
    found = accel.get_device_properties(0)
    assert found.name == processor_name()
    assert 2**28 < found.total_memory < 2**50
    assert 1 <= found.multi_processor_count <= 4096
    assert (found.major, found.minor) == (0, 0)


def test_bf16_is_what_the_backend_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accel.is_bf16_supported() is True
    for fast in (("bfloat16",), ()):
        monkeypatch.setattr(CpuBackend, "capabilities", lambda self, fast=fast: Capabilities(fast_dtypes=fast))
        assert accel.is_bf16_supported(including_emulation=False) is (fast != ())


def test_old_tensor_types_are_the_cpu_s() -> None:
    assert accel.FloatTensor([1.0, 2.0]).type() == "torch.FloatTensor"
    for name in ("Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Char", "Bool"):
        assert getattr(accel, f"{name}Tensor") is getattr(torch, f"{name}Tensor")


def test_the_cuda_runtime_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(
        xamp.UnsupportedPolicy,
        match=r"^accel\.cudart\(\): the device in use is of type 'cpu'.*use torch\.profiler\.profile\(\); to wait",
    ):
        accel.cudart().cudaProfilerStart()


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_of_memory_is_from_0_to_1(fraction: float) -> None:
    accel.set_per_process_memory_fraction(0.5, 0)
    with pytest.raises(
        xamp.PolicyError, match=rf"^accel\.set_per_process_memory_fraction\({fraction}\): must be a number from 0\.0 to"
    ):
        accel.set_per_process_memory_fraction(fraction)


@pytest.mark.parametrize("call", ["accel.set_device", "accel.Stream", "accel.device", "accel.memory_allocated"])
def test_another_type_of_device_is_refused(call: str) -> None:
    text = rf"^{call}\('cuda:1'\): the device in use is of type 'cpu'\. Pass an index .* XAMP_DEVICE=cuda\."
    with pytest.raises(xamp.PolicyError, match=text):
        getattr(accel, call.partition(".")[2])("cuda:1")


def test_the_device_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from xamp.registry import device_in_use

    accel.synchronize()
    monkeypatch.setattr(device_in_use, "device", lambda: pytest.fail("found again"))
    accel.synchronize()
    accel.set_device(1)


# --- the generator


def test_seeding_is_seeding_torch_s_generator_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("an accelerator was seeded"))
    for seed in (accel.manual_seed, accel.manual_seed_all, accel.random.manual_seed_all):
        torch.rand(3)
        seed(5)
        assert accel.initial_seed() == 5
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", ["seed", "seed_all"])
def test_seeding_at_random_differs_each_time(name: str) -> None:
    draws = []
    for _ in range(2):
        accel.manual_seed(1)
        assert getattr(accel, name)() is None
        draws.append(torch.rand(8))
    assert not torch.equal(*draws)


def test_a_state_is_a_copy_that_brings_the_numbers_back() -> None:
    state, states = accel.get_rng_state(), accel.get_rng_state_all()
    assert (state.dtype, state.numel(), len(states)) == (torch.uint8, 5056, 1)
    kept = state.clone()
    expected = torch.rand(4)
    assert torch.equal(state, kept)
    ways: list[Callable[[], None]] = [
        lambda: accel.set_rng_state(state),
        lambda: accel.set_rng_state(new_state=state, device=0),
        lambda: accel.random.set_rng_state_all(states),
        lambda: accel.set_rng_state_all(iter(states)),
    ]
    for restore in ways:
        restore()
        assert torch.equal(torch.rand(4), expected)
    accel.set_rng_state(state)
    accel.set_rng_state_all([])  # saved where there was none
    assert torch.equal(torch.rand(4), expected)


def test_another_device_s_state_is_refused_and_changes_nothing() -> None:
    before = accel.get_rng_state()
    with pytest.raises(
        xamp.CheckpointError,
        match=r"^accel\.set_rng_state\(new_state\): new_state has 16 elements of torch\.uint8, a state of the CPU's "
        r"generator 5056 .*: xamp\.accel\.manual_seed_all\(seed\)",
    ):
        accel.set_rng_state_all([torch.zeros(16, dtype=torch.uint8)])
    with pytest.raises(xamp.CheckpointError, match=r"has 5056 elements of torch\.int32"):
        accel.set_rng_state(before.int())
    with pytest.raises(xamp.CheckpointError, match=r"the states of 2 devices, and a CPU has one generator\. Leave"):
        accel.set_rng_state_all([before, before])
    assert torch.equal(accel.get_rng_state(), before)


# --- memory


def test_memory_is_that_of_the_process() -> None:
    accel.reset_peak_memory_stats()
    before = accel.memory_allocated()
    assert 50 * MB < before <= accel.max_memory_allocated()
    large = torch.ones(50_000_000)  # 200 MB
    held = accel.memory_allocated()
    assert 150_000_000 < held - before < 300_000_000
    assert accel.memory_reserved() > before + 150_000_000
    assert accel.memory_cached() > before + 150_000_000
    stats = accel.memory_stats()
    assert min(stats.values()) > before + 150_000_000
    assert set(stats) == {
        f"{kind}_bytes.all.{which}" for kind in ("allocated", "reserved") for which in ("current", "peak")
    }
    del large
    assert accel.memory_allocated() < before + 50_000_000
    peaks = [accel.max_memory_allocated(), accel.max_memory_reserved(), accel.max_memory_cached()]
    assert min(peaks) >= held
    assert accel.memory_stats()["allocated_bytes.all.peak"] >= held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a peak begin anew")
@pytest.mark.parametrize("name", ["reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"])
def test_a_peak_begins_anew(name: str) -> None:
    before = accel.memory_allocated()
    large = torch.ones(25_000_000)
    del large
    assert accel.max_memory_allocated() > before + 80_000_000
    getattr(accel, name)()
    assert accel.max_memory_allocated() < before + 50_000_000


def test_a_peak_never_falls_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    accel.reset_peak_memory_stats()
    told = accel.max_memory_allocated()
    monkeypatch.setattr(host_memory, "_figure", lambda path, name: 4096)
    assert accel.memory_allocated() == 4096
    assert accel.max_memory_allocated() >= told


def test_free_memory_is_a_part_of_all() -> None:
    free, total = accel.mem_get_info()
    assert 2**24 < free <= total
    assert total == accel.get_device_properties().total_memory


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    machine = host_memory.total()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000000\nactive_file 7\n")
    assert accel.mem_get_info()[1] == machine
    (tmp_path / "memory.max").write_text("500000000\n")
    assert accel.mem_get_info() == (300_000_000, 500_000_000)
    (tmp_path / "memory.current").write_text("700000000\n")
    assert accel.mem_get_info() == (0, 500_000_000)
    for name in ("max", "current", "stat"):
        (tmp_path / f"memory.{name}").unlink()
    older = tmp_path / "memory"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("400000000")
    (older / "memory.usage_in_bytes").write_text("150000000")
    (older / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50000000\n")
    assert accel.mem_get_info() == (300_000_000, 400_000_000)
    assert accel.get_device_properties().total_memory == 400_000_000


def test_without_proc_other_sources_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resource

    proc_says = host_memory.resident()
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_seen", 0)
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert accel.max_memory_allocated() >= highest
    accel.reset_peak_memory_stats()  # cannot, and says nothing
    assert accel.max_memory_allocated() >= highest
    assert accel.get_device_properties().total_memory > 2**28
    shown = subprocess.CompletedProcess([], 0, stdout=f"  {proc_says // 1024}\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: shown)
    assert abs(accel.memory_allocated() - proc_says) < 1024
    with pytest.raises(xamp.UnsupportedPolicy, match=r"does not tell the memory that is free\. Guard the call"):
        accel.mem_get_info()


def test_a_system_that_tells_nothing_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError("ps")))
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr("os.sysconf")
    for ask, what in (
        (accel.memory_allocated, "the resident set of this process"),
        (accel.max_memory_allocated, "the peak of this process"),
        (accel.get_device_properties, "the memory of the machine"),
    ):
        with pytest.raises(xamp.UnsupportedPolicy, match=rf"^xamp\.accel on a CPU: \w+ does not tell {what}\. Guard"):
            ask()


def test_the_summary_is_a_text_and_the_snapshot_empty() -> None:
    text = accel.memory_summary(0, abbreviated=True)
    assert re.search(r"^in use +\d+\.\d +\d+\.\d$", text, re.MULTILINE)
    assert float(text.split()[-1]) * MB > 50 * MB
    assert accel.memory_snapshot() == []
    accel.reset_accumulated_memory_stats()


# --- streams and events


def test_streams_nest_and_come_back() -> None:
    first, second = accel.Stream(), accel.Stream(priority=-1)
    assert accel.current_stream() is accel.default_stream()
    with accel.stream(first):
        assert accel.current_stream() is first
        with second, accel.stream(None), second:
            assert accel.current_stream() is second
        assert accel.current_stream() is first
    assert accel.current_stream() is accel.default_stream()
    assert (second.priority, accel.Stream.priority_range()) == (-1, (0, 0))


def test_a_block_can_be_entered_again_and_ends_on_an_error() -> None:
    stream = accel.Stream()
    block = accel.stream(stream)
    assert type(block) is accel.StreamContext
    with block, block:
        assert accel.current_stream() is stream
    with pytest.raises(KeyError), block:
        raise KeyError
    assert accel.current_stream() is accel.default_stream()


def test_a_stream_set_for_good_is_this_thread_s_alone() -> None:
    stream, default, seen = accel.Stream(), accel.default_stream(), []
    accel.set_stream(stream)
    accel.set_stream(None)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: seen.append(accel.current_stream()))
    thread.start()
    thread.join()
    assert accel.current_stream() is stream
    accel.set_stream(default)
    assert seen == [default]


@pytest.mark.parametrize("call", [accel.stream, accel.set_stream])
def test_a_stream_of_another_kind_is_refused(call: Any) -> None:
    with pytest.raises(
        xamp.PolicyError, match=r"^accel\.(set_)?stream\(3\): .*must be an xamp\.accel\.Stream or None\. Make it with"
    ):
        call(3)


def test_events_are_recorded_and_timed() -> None:
    stream, start, end = accel.Stream(), accel.Event(enable_timing=True), accel.Event(True, blocking=True)
    before = time.perf_counter()
    assert stream.record_event(start) is start
    time.sleep(0.03)
    end.record(stream)
    end.synchronize()
    around = 1000 * (time.perf_counter() - before)
    elapsed = start.elapsed_time(end)
    assert isinstance(elapsed, float)
    assert 29.0 <= elapsed <= around
    assert end.elapsed_time(start) == -elapsed
    made = stream.record_event()
    assert type(made) is accel.Event
    assert (stream.query(), made.query()) == (True, True)
    stream.wait_event(made)
    stream.wait_stream(accel.current_stream())
    made.wait(stream)
    stream.synchronize()
    assert repr(stream) == "<xamp.accel.Stream device=cpu>"
    assert (repr(start), repr(made)) == ("<xamp.accel.Event timed>", "<xamp.accel.Event untimed>")


def test_a_time_that_was_not_taken_is_an_error() -> None:
    timed, untimed, unrecorded = accel.Event(enable_timing=True), accel.Event(), accel.Event(enable_timing=True)
    timed.record()
    untimed.record()
    for start, end, which in (
        (timed, untimed, "end_event"),
        (timed, unrecorded, "end_event"),
        (untimed, timed, "this"),
    ):
        with pytest.raises(xamp.StateError, match=rf"Event\(enable_timing=True\) and recorded before; {which}"):
            start.elapsed_time(end)


def test_tensors_can_be_recorded_in_a_stream() -> None:
    for stream in (accel.current_stream(), accel.Stream(), accel.default_stream()):
        assert isinstance(stream, torch.Stream)
        for tensor in (torch.ones(3), torch.nn.Parameter(torch.ones(3)), torch.ones(4)[::2], torch.ones(2).half()):
            tensor.record_stream(stream)
        with torch.inference_mode():
            torch.ones(3).record_stream(stream)
    with pytest.raises(NotImplementedError):  # other streams are as they were
        torch.ones(3).record_stream(torch.Stream(device="cpu"))


def test_streams_are_told_apart() -> None:
    one, other = accel.Stream(), accel.Stream()
    assert [one == each for each in (one, other)] == [True, False]
    assert [one != each for each in (one, other)] == [False, True]
    assert len({one, other, one}) == 2


# --- ranges for a profiler


@pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events:UserWarning"
)  # torch 2.11 says so whatever is asked
def test_ranges_are_seen_by_the_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert accel.nvtx.range_push("outer part") == 0
        assert accel.nvtx.range_push("inner part") == 1
        torch.ones(10).sum()
        assert accel.nvtx.range_pop() == 1
        assert accel.nvtx.range_pop() == 0
        handle = accel.nvtx.range_start("from here")
        accel.nvtx.mark("one moment")
        with accel.nvtx.range("step {} of {total}", 3, total=9):
            pass
        accel.nvtx.range_end(handle)
    names = {event.key for event in profile.key_averages()}
    assert {"outer part", "inner part", "from here", "one moment", "step 3 of 9"} <= names


def test_a_range_too_many_closed_is_no_error() -> None:
    assert accel.nvtx.range_pop() == -1
    accel.nvtx.range_end(12345)
    with pytest.raises(KeyError), accel.nvtx.range("fails"):
        raise KeyError
    assert accel.nvtx.range_pop() == -1


def test_a_range_decorates_a_function() -> None:
    @accel.nvtx.range("whole")
    def depth() -> int:
        inner = accel.nvtx.range_push("inside")
        accel.nvtx.range_pop()
        return inner

    assert (depth(), depth()) == (1, 1)


# --- as scripts use them


class Prefetcher:
    """Copies and normalizes the next batch in a stream of its own, while the last one is in use."""

    def __init__(self, loader: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.loader = iter(loader)
        self.stream = accel.Stream()
        self.mean = torch.tensor([100.0, 110.0, 120.0]).to(xamp.device()).view(1, 3, 1, 1)
        self.preload()

    def preload(self) -> None:
        self.images: torch.Tensor | None
        self.target: torch.Tensor | None
        self.images, self.target = next(self.loader, (None, None))
        if self.images is None or self.target is None:
            return
        with accel.stream(self.stream):
            self.target = self.target.to(xamp.device(), non_blocking=True)
            self.images = self.images.to(xamp.device(), non_blocking=True).float().sub_(self.mean)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            accel.current_stream().wait_stream(self.stream)
            images, target = self.images, self.target
            if images is None or target is None:
                return
            images.record_stream(accel.current_stream())
            target.record_stream(accel.current_stream())
            self.preload()
            yield images, target


def test_a_prefetcher_runs() -> None:
    batches = [(torch.full((2, 3, 4, 4), 130, dtype=torch.uint8), torch.tensor([index, 1])) for index in range(3)]
    got = list(Prefetcher(batches))
    assert [target[0].item() for _, target in got] == [0, 1, 2]
    assert all(images[0, :, 0, 0].tolist() == [30.0, 20.0, 10.0] for images, _ in got)


def test_a_rank_sets_up_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "7")
    import os

    local_rank = int(os.environ["LOCAL_RANK"])
    accel.set_device(local_rank)
    accel.set_device(int(os.environ["RANK"]) % accel.device_count())
    device = torch.device(xamp.device_type(), local_rank)
    accel.set_device(device)
    accel.set_device(f"{xamp.device_type()}:{local_rank}")
    with pytest.raises(xamp.PolicyError, match="make an int of an environment variable"):
        accel.set_device(os.environ["LOCAL_RANK"])
    n_gpu = accel.device_count()
    assert 8 * max(1, n_gpu) == 8
    assert accel.current_device() == 0


def test_everything_is_seeded_as_before() -> None:
    def set_seed(seed: int, n_gpu: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        if n_gpu > 0:
            accel.manual_seed_all(seed)

    set_seed(42, accel.device_count())
    seeded = torch.rand(5)
    torch.manual_seed(42)
    assert torch.equal(torch.rand(5), seeded)


def test_a_checkpoint_keeps_the_generators(tmp_path: Path) -> None:
    states = {"cpu": torch.random.get_rng_state(), "cuda": accel.random.get_rng_state_all()}
    torch.save({**states, "cuda_rng_state": accel.get_rng_state()}, tmp_path / "rng.pt")
    expected = torch.rand(5)
    loaded = torch.load(tmp_path / "rng.pt")
    torch.random.set_rng_state(loaded["cpu"])
    accel.random.set_rng_state_all(loaded["cuda"])
    assert torch.equal(torch.rand(5), expected)
    accel.set_rng_state(loaded["cuda_rng_state"])
    assert torch.equal(torch.rand(5), expected)


def test_a_log_line_shows_memory_and_time() -> None:
    memory = f"{accel.memory_reserved() / 1e9 if accel.is_available() else 0:.3g}G"
    assert memory == "0G"
    line = f"max mem: {accel.max_memory_allocated() / MB:.0f}"
    assert int(line.rpartition(" ")[2]) > 50
    accel.synchronize()
    start, busy = time.time(), time.thread_time()
    accel.synchronize()
    assert time.time() >= start
    assert time.thread_time() - busy < 0.1, "there is nothing to do"


def test_events_kept_as_values_are_told_apart() -> None:
    timer = {"start": accel.Event(enable_timing=True), "end": time.perf_counter()}
    assert [type(mark) == accel.Event for mark in timer.values()] == [True, False]  # noqa: E721  # as scripts write it
    assert isinstance(timer["start"], accel.Event)
    assert callable(accel.is_available)  # asked without its parentheses it counts as true, as torch.cuda's does


def test_a_subclass_works() -> None:
    class Named(accel.Stream):
        label = "copies"

    stream = Named()
    with accel.stream(stream):
        current: Any = accel.current_stream()
        assert current.label == "copies"


def test_bf16_is_chosen_where_it_is_supported() -> None:
    dtype = "bfloat16" if accel.is_available() and accel.is_bf16_supported() else "float16"
    assert dtype == "float16"
    assert [accel.get_device_capability()[0] >= major for major in (7, 8, 9)] == [False] * 3
