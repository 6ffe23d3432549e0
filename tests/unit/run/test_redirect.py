"""What a script asks of CUDA is answered by the CPU inside the block, and after it torch is as it was.

Covers: xamp.run.redirect, xamp.run.handlers, xamp.run.names, xamp.run.casts, xamp.run.patches.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing.spawn
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import BackendUnavailable, UnsupportedPolicy
from xamp.run.casts import _legacy_dtype
from xamp.run.devices import Target
from xamp.run.redirect import redirected
from xamp.run.report import Report

pytestmark = pytest.mark.filterwarnings("ignore:`torch.cuda.amp:FutureWarning", "ignore:TypedStorage:UserWarning")

Code = Callable[[], Any]

BUILT_FOR = torch.version.cuda
cuda: Any = torch.cuda  # with the names that torch's types leave out
ones: Callable[..., Any] = torch.ones
linear: Callable[..., Any] = nn.Linear


def npu() -> Any:
    """``torch.npu``, which is there inside the block."""
    return torch.npu


@pytest.fixture
def on_cpu() -> Iterator[Report]:
    with redirected("cpu") as report:
        yield report


# ---------------------------------------------------------------- nothing is left behind

_CLASSES = (
    *(torch.Tensor, torch._C.TensorBase, nn.Module, nn.SyncBatchNorm, torch.UntypedStorage, torch.storage._StorageBase),
    *(torch.TypedStorage, torch.autocast, torch.amp.GradScaler, torch.nn.parallel.DistributedDataParallel),
    *(torch.utils.data.DataLoader, argparse.ArgumentParser),
)


def _everything() -> dict[tuple[str, str], int]:
    """The identity of every attribute of every module of torch that is loaded, and of the classes that are changed."""
    found: dict[tuple[str, str], int] = {}
    owners: dict[str, Any] = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    owners |= {f"class {owner.__name__}": owner for owner in _CLASSES}
    owners["spawn"] = multiprocessing.spawn
    for place, owner in owners.items():
        if isinstance(owner, (types.ModuleType, type)):
            found |= {(place, name): id(value) for name, value in vars(owner).items() if name != "__warningregistry__"}
    return found


def _script(level: str = "O2") -> None:
    from apex import amp  # type: ignore[import-not-found]

    model = nn.Linear(3, 2).cuda()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(4, 3, device="cuda")).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    with torch.autocast("cuda"), cuda.stream(cuda.Stream()):
        torch.mm(ones(2, 2).npu(), torch.ones(2, 2))
    import torch_npu  # noqa: F401

    torch.ones(1, device=torch.device("npu:0"))


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("pretend", [False, True], ids=["", "pretend"])
def test_torch_is_identical_afterwards(fails: bool, pretend: bool) -> None:
    for level in ("O1", "O2"):  # what torch loads on demand is loaded
        with redirected("cpu"):
            _script(level)
    before, modules, finders, environment = _everything(), {*sys.modules}, list(sys.meta_path), dict(os.environ)

    def run() -> None:
        with redirected("cpu", pretend_cuda=pretend):
            _script("O1" if fails else "O2")
            if fails:
                raise KeyError("the script's")

    if fails:
        with pytest.raises(KeyError):
            run()
    else:
        run()
    after = _everything()
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
    assert {*sys.modules} == modules
    assert sys.meta_path == finders
    assert dict(os.environ) == environment


def test_an_unknown_device_changes_nothing() -> None:
    xamp.available_backends()  # which the message lists: what there is starts before, for it may change torch
    before = _everything()
    with pytest.raises(BackendUnavailable, match="quipu"), redirected("quipu"):
        pytest.fail("entered")  # pragma: no cover
    assert _everything() == before


def test_a_replaced_function_is_restored_even_if_the_script_replaced_it_too() -> None:
    before = vars(torch)["zeros"]
    with redirected("cpu"):
        torch.zeros = None  # type: ignore[assignment]
    assert torch.zeros is before


# ---------------------------------------------------------------- placing

_FILE = io.BytesIO()
torch.save({"w": torch.arange(3.0)}, _FILE)


def _loaded(location: Any) -> Any:
    _FILE.seek(0)
    return torch.load(_FILE, map_location=location)["w"]


PLACED: dict[str, Code] = {
    "Tensor.cuda()": lambda: torch.ones(2).cuda(),
    "Tensor.cuda(1)": lambda: torch.ones(2).cuda(1, non_blocking=True),
    "Tensor.cuda(device=)": lambda: torch.ones(2).cuda(device=torch.device("cuda:3")),
    "Tensor.to": lambda: torch.ones(2).to("cuda"),
    "Tensor.to(device, dtype)": lambda: torch.ones(2).to(torch.device("cuda", 1), torch.float16).float(),
    "Tensor.to(index)": lambda: torch.ones(2).to(0),
    "Tensor.to(device=)": lambda: torch.ones(2).to(device="cuda:1", non_blocking=True),
    "Module.cuda()": lambda: nn.Linear(2, 1).cuda(0).weight,
    "Module.to": lambda: nn.Linear(2, 1).to("cuda:0").weight,
    "Module(device=)": lambda: nn.Linear(2, 1, device="cuda").weight,
    "Module.to_empty": lambda: nn.Linear(2, 1, device="meta").to_empty(device="cuda").weight,
    "zeros": lambda: torch.zeros(2, device="cuda"),
    "tensor": lambda: torch.tensor([1.0], device="cuda:0"),
    "as_tensor": lambda: torch.as_tensor([1.0], device=torch.device("cuda")),
    "randn_like": lambda: torch.randn_like(torch.ones(2), device="cuda"),
    "pinned": lambda: torch.empty(2, pin_memory=True),
    "eye(device=index)": lambda: torch.eye(2, device=0),
    "new_zeros": lambda: torch.ones(2).new_zeros(3, device="cuda"),
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0], device="cuda:1"),
    "fftfreq": lambda: torch.fft.fftfreq(3, device="cuda"),
    "load(str)": lambda: _loaded("cuda"),
    "load(device)": lambda: _loaded(torch.device("cuda:0")),
    "load(dict)": lambda: _loaded({"cpu": "cuda:0"}),
    "load(storage.cuda)": lambda: _loaded(lambda storage, _: storage.cuda(0)),
    "load(None)": lambda: _loaded(lambda _, __: None),
    "with device": lambda: _in(torch.device("cuda")),
    "pin_memory": lambda: torch.ones(2).pin_memory(),
    "generator": lambda: torch.rand(2, generator=torch.Generator(device="cuda").manual_seed(3), device="cuda"),
    "FloatTensor": lambda: cuda.FloatTensor([1.0, 2.0]),
    "FloatTensor(sizes)": lambda: cuda.FloatTensor(2, 3).fill_(0),
    "type(str)": lambda: torch.ones(2).half().type("torch.cuda.FloatTensor"),
    "type(type)": lambda: torch.ones(2).half().type(cuda.FloatTensor),
    "npu": lambda: ones(2).npu(),
    "npu(str)": lambda: linear(2, 1).npu("npu:2").weight,
    "to(npu)": lambda: torch.ones(2).to("npu:1"),
    "zeros(npu)": lambda: torch.zeros(2, device="npu:0"),
    "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(2)]).cuda().data,
    "storage": lambda: torch.tensor([1.0]).set_(ones(2).untyped_storage().cuda()),
}


def _in(device: torch.device) -> torch.Tensor:
    with device:
        return torch.ones(2)


@pytest.mark.parametrize("how", PLACED)
def test_requests_for_another_device_land_on_the_one_in_use(how: str, on_cpu: Report) -> None:
    found = PLACED[how]()
    assert (found.device.type, found.dtype) == ("cpu", torch.float32)
    assert how == "load(None)" or sum(row.count for row in on_cpu.rows("redirected")) >= 1


@pytest.mark.parametrize("how", ["Tensor.cuda()", "zeros", "Module(device=)"])
def test_without_the_block_they_ask_for_cuda(how: str) -> None:
    try:
        asked = PLACED[how]().device.type  # this machine has it
    except (RuntimeError, AssertionError) as error:
        asked = "cuda" if "CUDA" in str(error) or "NVIDIA" in str(error) else str(error)
    assert asked == "cuda"


def test_tensors_saved_on_cuda_are_loaded(on_cpu: Report) -> None:
    saved = torch.serialization.location_tag
    torch.serialization.location_tag = lambda _: "cuda:1"  # type: ignore[assignment]
    try:
        file = io.BytesIO()
        torch.save(torch.arange(3.0), file)
    finally:
        torch.serialization.location_tag = saved
    locations: Any = (None, {"cuda:1": "cuda:0"}, lambda storage, _: None, "cuda:1")
    for location in locations:
        file.seek(0)
        assert torch.load(file, map_location=location).tolist() == [0.0, 1.0, 2.0]


def test_values_are_those_of_the_cpu(on_cpu: Report) -> None:
    torch.manual_seed(7)
    drawn = torch.rand(3, device="cuda")
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


# ---------------------------------------------------------------- names of torch.cuda

ANSWERED: dict[str, tuple[Code, Any]] = {
    "set_device": (lambda: cuda.set_device("cuda:3"), None),
    "set_device(index)": (lambda: cuda.set_device(5), None),
    "current_device": (lambda: cuda.current_device(), 0),
    "synchronize": (lambda: cuda.synchronize(torch.device("cuda:0")), None),
    "empty_cache": (lambda: cuda.empty_cache(), None),
    "rng": (lambda: cuda.set_rng_state(cuda.get_rng_state()), None),
    "range_push": (lambda: cuda.nvtx.range_push("x"), 0),
    "range_pop": (lambda: cuda.nvtx.range_pop(), 0),
    "device": (lambda: cuda.device("cuda:1").__enter__(), None),
    "npu.set_device": (lambda: npu().set_device("npu:1"), None),
    "npu.synchronize": (lambda: npu().synchronize(), None),
    "npu.set_option": (lambda: npu().set_option({"a": 1}), None),
}


def test_functions_of_the_device_are_answered(on_cpu: Report) -> None:
    for name, (code, result) in ANSWERED.items():
        assert code() == result, name
    assert cuda.max_memory_allocated() > 0


def test_streams_and_events(on_cpu: Report) -> None:
    stream = cuda.Stream()
    assert isinstance(stream, cuda.Stream)
    assert isinstance(cuda.current_stream(), cuda.Stream)
    with cuda.stream(stream):
        value = torch.ones(2).cuda()
    cuda.current_stream().wait_stream(stream)
    value.record_stream(cuda.current_stream())
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine may have is not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_the_truth_is_told_and_counted(no_cuda: None, on_cpu: Report) -> None:
    assert not cuda.is_available()
    assert cuda.device_count() == 0
    assert not npu().is_available()
    assert not torch.ones(1).cuda().is_cuda
    assert torch.ones(1).cuda().type() == "torch.FloatTensor"
    assert torch.version.cuda == BUILT_FOR
    told = [(row.what, row.count) for row in on_cpu.rows("told")]
    assert ("torch.cuda.is_available() -> False", 1) in told
    assert ("torch.cuda.device_count() -> 0", 1) in told


def test_pretending_reaches_the_script_and_not_torch(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with redirected("cpu", pretend_cuda=True) as report:
        assert cuda.is_available()
        assert cuda.device_count() == 1
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert cuda.device_count() == 2
        assert torch.ones(1).is_cuda
        assert torch.ones(1).half().type() == "torch.cuda.HalfTensor"
        assert nn.DataParallel(nn.Linear(2, 1)).device_ids == []  # torch asked, and was told the truth
        assert not xamp.is_available()
        assert repr(torch.ones(1)) == "tensor([1.])"
        assert cuda.get_device_properties(0).total_memory > 0
        pretended = {row.what for row in report.rows("pretended")}
    assert {"torch.cuda.is_available() -> True", "Tensor.is_cuda -> True"} <= pretended
    assert not torch.ones(1).is_cuda


# ---------------------------------------------------------------- torch.accelerator


@pytest.fixture
def no_accelerator(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def test_accelerator_is_told_the_truth_and_its_functions_are_answered(no_accelerator: None) -> None:
    accelerator: Any = torch.accelerator
    with redirected("cpu") as report:
        assert not accelerator.is_available()
        assert accelerator.device_count() == 0
        assert accelerator.current_accelerator() is None
        assert {row.what for row in report.rows("told")} == {
            "torch.accelerator.is_available() -> False",
            "torch.accelerator.device_count() -> 0",
            "torch.accelerator.current_accelerator() -> None",
        }
        assert accelerator.current_device_index() == 0
        accelerator.set_device_index("cuda:1")
        accelerator.synchronize()
        assert isinstance(accelerator.current_stream(), cuda.Stream)
        with accelerator.device_index(0):
            assert accelerator.current_device_index() == 0
        counted = {row.what: (row.count, row.port) for row in report.rows("redirected")}
    assert counted["torch.accelerator.current_device_index()"] == (2, "xamp.accel.current_device()")
    assert counted["torch.accelerator.device_index()"] == (1, "xamp.accel.device()")
    assert not torch.accelerator.is_available()


def test_the_memory_of_an_accelerator_is_answered_by_both_its_names(no_accelerator: None) -> None:
    memory: Any = pytest.importorskip("torch.accelerator.memory")
    with redirected("cpu") as report:
        memory.empty_cache()
        assert memory.memory_allocated() > 0
        if hasattr(memory, "empty_host_cache"):  # torch 2.13
            memory.empty_host_cache()
            torch.accelerator.empty_host_cache()
        counted = {row.what: (row.count, row.port) for row in report.rows("redirected")}
    assert counted["torch.accelerator.memory.empty_cache()"] == (1, "xamp.accel.empty_cache()")


def test_a_script_that_needs_an_accelerator_is_told_of_cuda(
    no_accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with redirected("cpu", pretend_cuda=True) as report:
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 3
        place = torch.accelerator.current_accelerator(check_available=True)
        assert place is not None
        assert place.type == "cuda"
        assert torch.ones(2, device=place).device.type == "cpu"
        with torch.autocast(place.type):
            assert (torch.ones(1, 2) @ torch.ones(2, 1)).dtype == torch.float16
        names: dict[str, Any] = {"__name__": "torch.somewhere", "torch": torch}
        exec("def inside():\n    a = torch.accelerator\n    return a.is_available(), a.current_accelerator()", names)
        assert names["inside"]() == (False, None)
        pretended = {row.what: row.count for row in report.rows("pretended")}
    assert pretended["torch.accelerator.is_available() -> True"] == 1
    assert pretended["torch.accelerator.current_accelerator() -> cuda"] == 1


def test_what_torch_asks_of_its_accelerator_goes_to_torch(no_accelerator: None) -> None:
    with redirected("cpu") as report:
        names: dict[str, Any] = {"__name__": "torch.somewhere", "torch": torch}
        exec("def inside():\n    torch.accelerator.synchronize()", names)
        with pytest.raises(Exception, match="accelerator"):
            names["inside"]()
        assert not report.rows()


def test_an_accelerator_that_is_the_device_in_use_answers_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    before = {name: getattr(torch.accelerator, name) for name in ("is_available", "synchronize", "current_accelerator")}
    with redirected("cpu", pretend_cuda=True):
        assert {name: getattr(torch.accelerator, name) for name in before} == before


REFUSED: dict[str, Code] = {
    "get_device_properties": lambda: cuda.get_device_properties(0),
    "get_device_capability": lambda: cuda.get_device_capability(),
    "CUDAGraph": lambda: cuda.CUDAGraph(),
    "graph": lambda: cuda.graph(None),
    "make_graphed_callables": lambda: cuda.make_graphed_callables(None, ()),
    "cudart": lambda: cuda.cudart(),
    "utilization": lambda: cuda.utilization(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_can_answer_is_a_clear_error(name: str, on_cpu: Report) -> None:
    with pytest.raises(UnsupportedPolicy, match=rf"torch\.cuda\.{name}\(\).*'cpu'.*cannot be redirected: \w+"):
        REFUSED[name]()
    assert [row.what for row in on_cpu.rows("refused")] == [f"torch.cuda.{name}()"]


def test_legacy_types_are_types(on_cpu: Report) -> None:
    assert isinstance(torch.ones(1), (cuda.HalfTensor, cuda.FloatTensor))
    assert not isinstance(torch.ones(1).half(), cuda.FloatTensor)
    assert cuda.LongTensor([1, 2]).dtype == torch.int64
    before = torch.get_default_dtype()
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_device_objects_stay_what_they_are(on_cpu: Report) -> None:
    device = torch.device("cuda", 1)
    assert (device.type, device.index) == ("cuda", 1)
    assert isinstance(device, torch.device)
    assert pickle.loads(pickle.dumps(device)) == device


# ---------------------------------------------------------------- autocast


def test_autocast_is_that_of_cuda(on_cpu: Report) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)), torch.randn(3, 4)
    for made in (cuda.amp.autocast(), torch.autocast("cuda"), torch.amp.autocast("cuda", dtype=torch.float16)):
        with made:
            assert torch.is_autocast_enabled()
            hidden, out = model[0](x), model(x)
        assert not torch.is_autocast_enabled()
        assert (hidden.dtype, out.dtype) == (torch.float16, torch.float32)
    with xamp.autocast():
        wanted = model(x)
    assert torch.equal(out, wanted)
    with torch.autocast("cuda", torch.bfloat16):
        assert model[0](x).dtype == torch.bfloat16
        with cuda.amp.autocast(enabled=False):
            assert model[0](x).dtype == torch.float32
        assert model[0](x).dtype == torch.bfloat16

    @cuda.amp.autocast()  # type: ignore[untyped-decorator]
    def decorated() -> torch.Tensor:
        result: torch.Tensor = model[0](x)
        return result

    assert decorated().dtype == torch.float16


def test_the_scaler_scales(on_cpu: Report) -> None:
    for scaler in (cuda.amp.GradScaler(init_scale=8.0), torch.amp.GradScaler(init_scale=8.0)):
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0, 8.0]
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [0.0, 0.0]


def test_custom_functions_follow_autocast(on_cpu: Report) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @cuda.amp.custom_fwd(cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * x

    with cuda.amp.autocast():
        assert Square.apply(torch.ones(2).half()).dtype == torch.float32  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- threads, workers, pickles


def test_threads_are_redirected_too(on_cpu: Report) -> None:
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1).cuda().device))
    thread.start()
    thread.join()
    assert found == [torch.device("cpu")]


class _Moves(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device="cuda")


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning", "ignore:'pin_memory':UserWarning")
def test_workers_of_a_loader_are_redirected_too(context: str, on_cpu: Report) -> None:
    loader = torch.utils.data.DataLoader(
        _Moves(),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=context,
        pin_memory=True,
        pin_memory_device="cuda",
    )
    assert [batch[:, 0].tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.device = torch.zeros, torch.device("cuda:0")


def test_modules_pickled_inside_load_outside() -> None:
    with redirected("cpu"):
        file = io.BytesIO()
        torch.save(_Keeps().cuda(), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert found.make is torch.zeros
    assert found.device == torch.device("cuda:0")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_scripting_still_works(on_cpu: Report) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros(2)]) + torch.ones_like(x).sum()

    assert torch.jit.script(twice)(torch.ones(2)).tolist() == [3.0, 3.0, 2.0, 2.0]


# ---------------------------------------------------------------- a machine that has CUDA


@pytest.fixture
def beside_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """The CPU, chosen on a machine whose torch says that there are two cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with redirected("cpu") as report:
        yield report


@pytest.mark.parametrize("options", [{}, {"device_ids": [0, 1]}, {"device_ids": ["cuda:0"], "output_device": 0}])
def test_data_parallel_uses_no_card_that_is_not_in_use(options: dict[str, Any], beside_cuda: Report) -> None:
    torch.manual_seed(0)
    model = linear(3, 2)
    wrapped = nn.DataParallel(model, **options).cuda()
    x = ones(4, 3)
    assert torch.equal(wrapped(x), model(x))
    assert wrapped.module is model
    assert {p.device.type for p in wrapped.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.type("torch.cuda.HalfTensor"),
        lambda x: x.type(cuda.HalfTensor),
        lambda x: x.type("torch.npu.HalfTensor"),
        lambda x: x.half().cuda(1),
        lambda x: x.half().to(1),
        lambda x: torch.as_tensor(x, dtype=torch.float16, device=1),
        lambda x: x.to("cuda:1", torch.float16),
    ],
)
def test_cards_that_are_there_are_not_used(move: Callable[[Any], Any], beside_cuda: Report) -> None:
    moved = move(ones(2))
    assert (moved.device.type, moved.dtype) == ("cpu", torch.float16)
    assert beside_cuda.rows("redirected")


def test_cuda_in_use_answers_for_itself() -> None:
    """Numbers and CUDA's own types are nothing to redirect there, and a tensor stays on its card."""
    target = Target("cuda", ("npu",))
    assert [target.is_foreign(found) for found in (0, 1, "cuda:1", "npu:1", True)] == [False, False, False, True, False]
    assert _legacy_dtype("torch.cuda.HalfTensor", target) is None
    assert _legacy_dtype("torch.npu.HalfTensor", target) is torch.float16
    on_host = Target("cpu", ("cuda", "npu"))
    assert [on_host.is_foreign(found) for found in (0, "cuda:1", "npu", "cpu", True)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert _legacy_dtype("torch.cuda.HalfTensor", on_host) is torch.float16


# ---------------------------------------------------------------- archives of TorchScript


@pytest.mark.filterwarnings("ignore:.*TorchScript archive", "ignore:`torch.jit")
@pytest.mark.parametrize("location", [None, "cuda", "cuda:0", torch.device("cuda", 1), "cpu"])
@pytest.mark.parametrize("call", ["torch.load", "torch.jit.load"])
def test_archives_of_torchscript_load(call: str, location: Any, on_cpu: Report) -> None:
    file = io.BytesIO()
    model = linear(3, 2)
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    if call == "torch.load":
        loaded = torch.load(file, map_location=location, weights_only=False)
    else:
        loaded = torch.jit.load(file, map_location=location)
    assert torch.equal(loaded(ones(1, 3)), model(ones(1, 3)))


@pytest.mark.filterwarnings("ignore:.*TorchScript archive", "ignore:`torch.jit")
def test_what_torch_refuses_of_an_archive_it_refuses_here() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(linear(3, 2)), file)

    def refusal() -> str:
        file.seek(0)
        with pytest.raises(ValueError, match="map_location should be") as caught:
            torch.load(file, map_location={"cuda:0": "cpu"}, weights_only=False)
        return str(caught.value)

    plain = refusal()
    with redirected("cpu"):
        assert refusal() == plain
