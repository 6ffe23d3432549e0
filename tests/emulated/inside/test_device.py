"""What a training script asks of the device: autocast, recomputing, random numbers, threads, files, memory.

Covers: backends.npu.emulation.strided, backends.npu.emulation.crossing, backends.npu.emulation.randoms.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.backends.npu.chips import Chip
from xamp.run.redirect import redirected

npu: Any = torch.get_device_module("npu")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def test_autocast_lowers_products_and_keeps_the_loss(chip: Chip) -> None:
    for dtype in (torch.float16, torch.bfloat16) if chip.bf16 else (torch.float16,):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).to(
            "npu"
        )
        x, y = torch.randn(4, 3, 8, 8).to("npu"), torch.randint(5, (4,)).to("npu")
        with torch.autocast("npu", dtype):
            assert model[0](x).dtype == dtype
            out = model(x)
            loss = F.cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (dtype, torch.float32)
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        host = copy.deepcopy(model).cpu()
        assert loss.item() == pytest.approx(F.cross_entropy(host(x.cpu()), y.cpu()).item(), abs=5e-2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_checkpointing_recomputes_the_same_numbers(reentrant: bool, drop: float) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(drop), nn.Tanh()).to("npu")
    x = torch.randn(4, 6, device="npu", requires_grad=True)
    torch.manual_seed(5)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    torch.manual_seed(5)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


RANDOMS: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(5, device="npu"),
    "rand": lambda: torch.rand(5, device="npu"),
    "randint": lambda: torch.randint(100, (9,), device="npu"),
    "randperm": lambda: torch.randperm(19, device="npu"),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(19, device="npu"), 9),
    "dropout": lambda: F.dropout(torch.ones(30, device="npu")),
    "exponential": lambda: torch.empty(5, device="npu").exponential_(),
    "rrelu": lambda: F.rrelu(-torch.ones(5, device="npu"), training=True),
    "normal": lambda: torch.normal(torch.zeros(5, device="npu"), 1.0),
}


@pytest.mark.parametrize("name", RANDOMS)
def test_random_numbers_follow_the_seed_and_the_state(name: str) -> None:
    make = RANDOMS[name]
    host = torch.get_rng_state()
    npu.manual_seed(3)
    first, second = make(), make()
    npu.manual_seed(3)
    assert torch.equal(make(), first)
    assert not torch.equal(first, second)
    state = npu.get_rng_state()
    third = make()
    npu.set_rng_state(state)
    assert torch.equal(make(), third)
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator is another one"


def test_threads_compute_each_its_own() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            x = torch.ones(10, device="npu")
            for _ in range(50):
                x = x + 1
            assert x.sum().item() == 510
            w = torch.randn(4, 4, device="npu", requires_grad=True)
            (w @ w).sum().backward()
            torch.testing.assert_close(w.grad, w.sum(0)[:, None] + w.sum(1)[None])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_states_are_saved_and_loaded_here_and_on_the_cpu() -> None:
    model = mlp().to("npu")
    optimizer = Adam(model.parameters())
    model(torch.randn(8, 6, device="npu")).square().mean().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for place in ("npu:0", "cpu"):
        file.seek(0)
        state = torch.load(file, map_location=None if place == "npu:0" else place)
        assert str(state["model"]["0.weight"].device) == place
        other = mlp().to(place)
        other.load_state_dict(state["model"])
        again = Adam(other.parameters())
        again.load_state_dict(state["optimizer"])
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())
            assert torch.equal(again.state[mine]["exp_avg"].cpu(), optimizer.state[theirs]["exp_avg"].cpu())


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3, 3) @ x.expand(3, 3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: F.mse_loss(x, torch.ones(3)),
        lambda x: torch.ones(3).add_(x),
    ],
)
def test_tensors_of_two_devices_do_not_mix(mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, device="npu"))


def sparse_rows(rows: list[int]) -> torch.Tensor:
    """Ones in these rows of eight."""
    indices, values = torch.tensor([rows], dtype=torch.long), torch.ones(len(rows), 4)
    return torch.sparse_coo_tensor(indices, values, (8, 4), check_invariants=True).to("npu")


@pytest.mark.parametrize(("rows", "more"), [([], [1, 3]), ([2], [2, 5, 7]), ([1, 1], [])], ids=str)
def test_a_sparse_tensor_written_to_may_grow(rows: list[int], more: list[int]) -> None:
    """Its parts are of other sizes afterwards, as when gradients of an embedding are added up in place."""
    total, added = sparse_rows(rows), sparse_rows(more)
    wanted = total.to_dense() + added.to_dense()
    total.add_(added)
    assert total.is_sparse
    assert torch.equal(total.to_dense(), wanted)
    total.mul_(2.0)
    assert torch.equal(total.to_dense(), 2 * wanted)
    total.zero_()
    assert torch.equal(total.to_dense(), torch.zeros_like(wanted))


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
def test_a_model_whose_weights_have_a_storage_format_comes_back(through: str) -> None:
    """Those of a batch norm have one on old chips: torch_npu casts them when the model is moved there."""
    model = nn.BatchNorm1d(8).to("npu")
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0))
    if through == "pickle":
        made = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    assert torch.ops.npu.get_npu_format(made.weight) == torch.ops.npu.get_npu_format(model.weight)
    assert made.weight.requires_grad
    assert made.weight.tolist() == list(range(8))


def test_memory_is_counted_bounded_and_given_back() -> None:
    before = npu.memory_allocated()
    x = torch.empty(1 << 20, device="npu")
    assert npu.memory_allocated() - before in ((4 << 20), (4 << 20) + 512)
    del x
    assert npu.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 38, device="npu")


def test_memory_of_the_host_serves_as_a_cards() -> None:
    before = npu.memory_allocated()
    x = torch.ops.npu.empty_with_swapped_memory([1000], dtype=torch.float32, device=torch.device("npu:0"))
    assert x.device.type == "npu"
    x.copy_(torch.arange(1000.0))
    assert (x * 2 + 1).cpu().tolist() == [2 * i + 1.0 for i in range(1000)]
    assert npu.memory_allocated() - before < 4096, "it takes no memory of the card"
    del x


def test_memory_of_the_host_is_registered_once() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    runtime = npu.npurt()
    assert runtime.npuHostRegister(memory.data_ptr(), 4096, 0) == 0
    assert runtime.npuHostRegister(memory.data_ptr(), 4096, 0) != 0
    assert runtime.npuHostUnregister(memory.data_ptr()) == 0
    assert runtime.npuHostUnregister(memory.data_ptr()) != 0


def test_an_event_is_pending_until_the_host_waits_or_asks_again() -> None:
    """A card works on while the host goes on; a script that takes the first answer for the last is wrong there."""
    event = npu.Event()
    assert event.query(), "it was never recorded"
    waits: list[Callable[[], object]] = [
        event.query,
        event.synchronize,
        npu.synchronize,
        npu.current_stream().synchronize,
        lambda: torch.ones(2, device="npu").sum().item(),
        lambda: torch.ones(2, device="npu").cpu(),
    ]
    for wait in waits:
        event.record()
        assert not event.query()
        event.record()
        wait()
        assert event.query(), wait


convolution: Any = nn.Conv2d
FORMATS: dict[str, Callable[[Any, Any], Any]] = {
    "to": lambda x, form: x.to(memory_format=form),
    "contiguous": lambda x, form: x.contiguous(memory_format=form),
    "half": lambda x, form: x.half(memory_format=form),
    "clone": lambda x, form: x.clone(memory_format=form),
    "to the card": lambda x, form: x.cpu().to("npu", memory_format=form),
    "empty": lambda x, form: torch.empty(x.shape, device="npu", memory_format=form),
    "a module": lambda x, form: convolution(3, 4, 3).to("npu").to(memory_format=form).weight,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_memory_format_of_the_device_in_use_is_one_that_the_card_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "npu")
    x = torch.randn(2, 3, 4, 4).to("npu")
    assert FORMATS[name](x, xamp.accel.channels_last).is_contiguous()
    if name in ("to", "contiguous", "half", "to the card", "a module"):
        with pytest.raises(RuntimeError, match=r"xamp\.accel\.channels_last is the memory format that the device in"):
            FORMATS[name](x, torch.channels_last)


def test_xamp_run_drops_a_memory_format_that_the_card_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "npu")
    x: Any = torch.randn(2, 3, 4, 4).to("npu")
    with redirected("npu") as report:
        for name, call in FORMATS.items():
            assert call(x, torch.channels_last).is_contiguous(), name
        moved = x.cuda(memory_format=torch.channels_last)
        conv = convolution(3, 4, 3).cuda()
        assert conv.to(memory_format=torch.channels_last) is conv
    assert moved.is_contiguous()
    dropped = sorted({row.what for row in report.rows("redirected") if "dropped" in row.what})
    names = ("Module.to", "Tensor.clone", "Tensor.contiguous", "Tensor.cuda", "Tensor.half", "Tensor.to", "torch.empty")
    assert dropped == [f"{name}(memory_format=torch.channels_last), dropped" for name in names]


def test_defaults_and_random_states_are_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "npu")
    try:
        xamp.accel.set_default_tensor_type(xamp.accel.HalfTensor)
        assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float16, "npu")
        xamp.accel.set_default_tensor_type(torch.FloatTensor)
        assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float32, "cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    with xamp.accel.random.fork_rng(devices=[xamp.accel.current_device()]):
        drawn = torch.rand(3, device="npu")
    assert torch.equal(torch.rand(3, device="npu"), drawn)
