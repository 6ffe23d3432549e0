"""Two cards in one process, processes that are started from one, compiled and fake tensors.

Covers: backends.npu.emulation.importing, backends.npu.emulation.strided, backends.npu.emulation.randoms.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

# What is started here is torch's and warns as it does elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

npu: Any = torch.get_device_module("npu")
FIRST, SECOND = torch.device("npu:0"), torch.device("npu:1")
SIX = "import torch; print((torch.ones(3, device='npu') + 1).sum().item())"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5))


def test_there_are_two_and_tensors_go_between_them() -> None:
    assert npu.device_count() == 2
    x = torch.arange(6.0, device=FIRST).reshape(2, 3)
    y = x.t().to(SECOND)
    assert y.device == SECOND
    assert y.tolist() == x.t().tolist()
    y.copy_((x + 1).t())
    assert y.tolist() == (x + 1).t().tolist()
    with pytest.raises(RuntimeError, match=r"npu:0.*npu:1|npu:1.*npu:0"):
        x.t() + y
    with pytest.raises(RuntimeError, match="nvalid device"):
        torch.ones(1, device="npu:7")


def test_the_current_device_is_where_tensors_are_made() -> None:
    with npu.device(1):
        assert torch.ones(1, device="npu").device == SECOND
        assert npu.current_device() == 1
    assert torch.ones(1, device="npu").device == FIRST
    x = torch.randn(3, device=SECOND)
    made = (x * 2, x.sum(), torch.randn_like(x), x.new_zeros(2), x.half(), torch.dropout(x, 0.5, True))
    assert {tensor.device for tensor in made} == {SECOND}


def test_each_card_has_its_own_generator() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(4, device=SECOND)
    torch.manual_seed(0)
    torch.randn(9, device=FIRST)
    assert torch.equal(torch.randn(4, device=SECOND), wanted)


def test_a_model_on_two_cards_trains_as_on_a_cpu() -> None:
    found = []
    for devices in ((torch.device("cpu"),) * 2, (FIRST, SECOND)):
        torch.manual_seed(0)
        first, second = nn.Linear(6, 16).to(devices[0]), nn.Linear(16, 5).to(devices[1])
        params = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.AdamW(params, lr=0.01)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(devices[0])
            optimizer.zero_grad()
            second(torch.tanh(first(x)).to(devices[1])).square().mean().backward()
            nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
        found.append([p.detach().cpu() for p in params])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_thread_has_its_own_current_device() -> None:
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            npu.set_device(index)
            for _ in range(30):
                x = torch.ones(3, device="npu", requires_grad=True)
                (x * 2).sum().backward()
                assert x.grad is not None
                assert x.device.index == x.grad.device.index == index
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same_numbers_and_gradients(backend: str) -> None:
    torch._dynamo.reset()
    model = net().to(FIRST)
    compiled: Any = torch.compile(model, backend=backend)
    x = torch.randn(4, 6, device=FIRST)
    wanted = model(x)
    wanted.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    found = compiled(x)
    found.sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    with torch.autocast("npu", torch.float16):
        assert compiled(x).dtype == torch.float16


def test_the_compiler_traces_no_kernel_that_runs_where_a_graph_is_broken() -> None:
    torch._dynamo.reset()
    counters.clear()
    graphs = CompileCounter()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    assert torch.compile(step, backend=graphs)(torch.ones(3, device=FIRST)).tolist() == [2.0] * 3
    assert (graphs.frame_count, counters["frames"]["total"]) == (2, 2)


def test_fake_tensors_take_the_dtypes_of_autocast() -> None:
    with FakeTensorMode():
        with torch.device("npu"):
            model, x = net(), torch.randn(8, 6)
        out = model(x)
        assert (out.device.type, out.shape) == ("npu", (8, 5))
        with torch.autocast("npu", torch.float16):
            assert model(x).dtype == torch.float16


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}])
def test_data_comes_from_workers_into_pinned_memory_and_to_the_card(options: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.arange(12))
    total = 0.0
    for x, _ in DataLoader(data, 4, pin_memory=True, **options):
        assert x.is_pinned()
        total += x.to("npu", non_blocking=True).sum().item()
    assert total == 66.0


def child(index: int, queue: Any = None) -> None:
    found = (torch.ones(2, device="npu") + index).sum().item()
    assert found == 2 + 2 * index
    if queue is not None:
        queue.put(found)


def test_processes_that_are_spawned_see_the_card() -> None:
    spawn(child, (None,), 2)


def test_a_process_of_a_forkserver_sees_the_card() -> None:
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=child, args=(3, queue))
    process.start()
    assert queue.get(timeout=120) == 8.0
    process.join()
    assert process.exitcode == 0


def test_a_child_process_without_the_card_may_make_xamp_unimportable() -> None:
    code = "import sys; sys.modules['xamp'] = None; import torch; print(torch.ones(3).sum().item())"
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=alone)
    assert done.stdout.split() == ["3.0"], done.stderr


@pytest.mark.parametrize(
    "variables",
    [{}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {"TASK_QUEUE_ENABLE": "2"}, {"ASCEND_HOME_PATH": "/nowhere"}],
    ids=["plain", "no-autoload", "queue", "another-home"],
)
def test_a_child_process_sees_the_card(variables: dict[str, str]) -> None:
    code = f"import torch, torch_npu; {SIX}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    assert done.stdout.split()[-1] == "6.0"


def test_a_script_may_ask_for_the_queue_and_reads_what_it_has_written() -> None:
    """torch_npu queues the copy that a tensor's growth takes; the operators after it do not wait in the queue."""
    code = """
import ctypes, torch, torch_npu
for turn in range(50):
    x = torch.full((1 << 16,), float(turn), device="npu")
    x.untyped_storage().resize_(1 << 20)
    assert x.sum().item() == turn * (1 << 16), turn
stream = ctypes.c_void_p(0)
assert torch.npu.npurt().npuStreamCreate(ctypes.addressof(stream)) == 0
torch.npu.ExternalStream(stream.value).npu_stream
"""
    variables = {"TASK_QUEUE_ENABLE": "1", "PER_STREAM_QUEUE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert "External NPU stream is not supported" in done.stderr, done.stderr


@pytest.mark.parametrize("first", ["transfer_to_npu", "xamp"])
def test_a_compiled_model_is_one_graph_after_transfer_to_npu(first: str) -> None:
    """It replaces the functions that ask for the state of autocast."""
    imports = ["from torch_npu.contrib import transfer_to_npu", "import xamp"]
    # Where Triton is installed, torch's compiler compares torch.cuda's capability, which is None then.
    code = f"""
import sys
sys.modules["triton"] = None
import torch, torch_npu
{"; ".join(sorted(imports, key=lambda line: first not in line))}
for level in ("O0", "O1", "O2"):
    model = torch.nn.Linear(3, 3).npu()
    model, optimizer = xamp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), level, verbosity=0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.rand(2, 3).npu()
    with xamp.scale_loss(compiled(x).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(compiled(x), model(x))
print("the same")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["the same"], done.stderr


def test_transfer_to_npu_makes_a_script_for_cuda_run() -> None:
    code = (
        "import torch; from torch_npu.contrib import transfer_to_npu; x = torch.ones(3).cuda()\n"
        "from torch.cuda.amp import GradScaler, autocast; scaler = GradScaler(init_scale=64.)\n"
        "model = torch.nn.Linear(3, 3).cuda(); optimizer = torch.optim.SGD(model.parameters(), .1)\n"
        "with autocast(): loss = model(x).sum()\n"
        "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n"
        "print(torch.cuda.is_available(), x.is_cuda, x.device, scaler.get_scale())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True npu:0 64.0"


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL")
def test_data_parallel_computes_as_one_card() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(FIRST)
    x = torch.randn(6, 4).to(FIRST)
    found = []
    for each in (nn.DataParallel(model, device_ids=[0, 1]), model):
        model.zero_grad()
        out = each(x)
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 5
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
