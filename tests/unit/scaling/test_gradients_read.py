"""What a script reads of a model's ``.grad`` after ``scale_loss``: the right unscaled value, None or an error.

Covers: xamp.scaling.reads, xamp.scaling.moves.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import onepass_reference
import pytest
import torch
from one_rank import one_rank
from torch import nn

import xamp
from xamp.errors import StateError

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
MASTERS = ("O2", "O5")


class Net(nn.Module):
    """A model whose embedding is its smallest parameter but one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 2)
        self.body = nn.Linear(10, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, i: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.emb(i).flatten(1))))


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.randint(0, 6, (16, 5), generator=torch.Generator().manual_seed(number))
    return i, i[:, 0] % 3


class Run:
    """A model at a level, and the gradients that an fp64 copy of it has."""

    def __init__(self, level: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.exact: Any = copy.deepcopy(self.model).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        scale = {"init_scale": 256.0} if level in ("O1", "O2") else {}
        xamp.initialize(self.model, self.optimizer, level, verbosity=0, **{**scale, **options})

    def backward(self, number: int = 0, times: float = 1.0) -> None:
        i, y = batch(number)
        loss = nn.functional.cross_entropy(self.model(i).float(), y) * times
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        (nn.functional.cross_entropy(self.exact(i), y) * times).backward()

    def check(self, times: float = 1.0) -> list[str]:
        """Compare what can be read; return the names of the parameters with a gradient."""
        found: Any = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for name, grad in found.items():
            wanted = self.exact.get_parameter(name).grad * times
            error = (grad.double() - wanted).norm() / wanted.norm()
            assert float(error) < 0.03, name
        return list(found)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("micro", [1, 3])
def test_what_is_read_is_the_unscaled_gradient(level: str, micro: int) -> None:
    run = Run(level)
    for number in range(micro):
        run.backward(number)
        names = run.check()
    assert len(names) == (2 if level in MASTERS else 5)
    run.optimizer.step()
    assert run.check() == names  # until they are cleared, as with torch
    run.optimizer.zero_grad()
    assert run.check() == []


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("clip", ["xamp", "torch", "loop"])
def test_what_is_read_is_what_the_step_will_take(level: str, clip: str) -> None:
    run = Run(level)
    run.backward()
    grads: Any = [p.grad for p in run.exact.parameters()]
    norm = float(torch.stack([grad.norm() for grad in grads]).norm())
    if clip == "xamp":
        xamp.clip_grad_norm_(run.optimizer, norm / 4)
    elif clip == "torch":
        torch.nn.utils.clip_grad_norm_(xamp.master_params(run.optimizer), norm / 4)
    else:
        for master in xamp.master_params(run.optimizer):
            assert master.grad is not None
            master.grad.mul_(0.25)
    assert len(run.check(0.25)) == 2


def test_a_gradient_that_fp16_cannot_hold_is_read_all_the_same() -> None:
    run = Run("O2", init_scale=2.0**24)
    run.backward(times=1e-9)
    assert len(run.check()) == 2
    assert 0 < float(run.model.head.bias.grad.norm()) < 1e-8


def test_an_overflow_is_read_as_what_it_is() -> None:
    run = Run("O2")
    run.backward(times=1e30)
    assert not bool(run.model.head.bias.grad.isfinite().all())


def pickled(grad: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda grad: grad.norm().reshape(1),
    "torch.norm": lambda grad: torch.norm(grad).reshape(1),
    "float": lambda grad: grad.float(),
    "clone": lambda grad: grad.clone(),
    "data": lambda grad: grad.data * 1.0,
    "detach": lambda grad: grad.detach().abs(),
    "index": lambda grad: grad[1:],
    "item": lambda grad: torch.tensor([grad[0].item()]),
    "tolist": lambda grad: torch.tensor(grad.tolist()),
    "numpy": lambda grad: torch.from_numpy(grad.cpu().numpy()),
    "stack": lambda grad: torch.stack([grad, grad]),
    "foreach": lambda grad: torch._foreach_norm([grad])[0].reshape(1),
    "keyword": lambda grad: torch.mul(input=grad, other=2.0),
    "of others": lambda grad: torch.ones(3) + grad,
    "into others": lambda grad: torch.ones(3).add_(grad),
    "transposed": lambda grad: grad[None].T,
    "T": lambda grad: grad.real * 1.0,
    "deepcopy": copy.deepcopy,
    "saved": pickled,
    "histogram": lambda grad: torch.histc(grad, bins=3, min=-1.0, max=1.0),
}


@pytest.mark.parametrize("read", READS)
def test_whatever_reads_it_gets_what_the_master_has(read: str) -> None:
    run = Run("O2")
    run.backward()
    master: Any = xamp.master_of(run.model.head.bias)
    wanted = READS[read](master.grad)
    found = READS[read](run.model.head.bias.grad)
    assert type(found) is torch.Tensor
    assert torch.equal(found, wanted)


def test_it_is_shown_as_what_it_is_and_fits_its_parameter() -> None:
    run = Run("O2")
    run.backward()
    grad, param = run.model.head.bias.grad, run.model.head.bias
    assert repr(grad) == repr(xamp.master_of(param).grad)
    assert (grad.dtype, grad.shape, grad.device) == (param.dtype, param.shape, param.device)
    assert not grad.requires_grad


def test_a_norm_over_the_model_and_a_step_are_not_clipping() -> None:
    """The masters have the gradients: what is written into the model's is an error, as before."""
    run = Run("O2")
    run.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    with pytest.raises(StateError, match="parameters were written to"):
        run.optimizer.step()


def by_none(model: Any) -> None:
    for param in model.parameters():
        param.grad = None


def by_zero(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


def by_data(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


def by_other_data(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = torch.zeros_like(param.grad)


def by_detached(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach().zero_()


def by_lists(model: Any) -> None:
    torch._foreach_zero_([param.grad for param in model.parameters() if param.grad is not None])


def by_fill(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad[:] = 0.0


def by_product(model: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad *= 0.0


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize(
    "clear", [by_none, by_zero, by_data, by_other_data, by_detached, by_lists, by_fill, by_product]
)
def test_who_clears_by_hand_is_noticed(level: str, clear: Callable[[Any], None]) -> None:
    run = Run(level)
    run.backward()
    clear(run.model)
    for param in run.model.parameters():
        assert param.grad is None or not bool(param.grad.any())
    run.exact.zero_grad()
    run.backward(1)
    assert len(run.check()) == 2
    run.optimizer.step()


@pytest.mark.parametrize("write", ["add_", "+=", "index", "data"])
def test_who_writes_into_it_is_told(write: str) -> None:
    run = Run("O2")
    run.backward()
    param = run.model.head.bias
    if write == "add_":
        assert param.grad.add_(1.0) is param.grad
    elif write == "+=":
        param.grad += 1.0
    elif write == "index":
        param.grad[0] = 1.0
    else:
        param.grad.data.add_(1.0)
    assert float(param.grad.max()) == 1.0  # what was written
    with pytest.raises(StateError, match="parameters were written to"):
        run.optimizer.step()


def test_a_backward_without_scale_loss_adds_its_own_and_counts_in_the_next() -> None:
    run = Run("O5")
    run.backward()
    i, y = batch(1)
    nn.functional.cross_entropy(run.model(i).float(), y).backward()
    alone = run.model.head.bias.grad
    assert float(alone.norm()) > 0.01
    nn.functional.cross_entropy(run.exact(i), y).backward()
    run.backward(2)
    assert len(run.check()) == 2


def test_a_model_may_be_moved_while_it_is_there() -> None:
    run = Run("O2")
    run.backward()
    run.model.to("cpu")
    assert len(run.check()) == 2
    run.optimizer.step()
    assert xamp.session(run.model).stats.applied == 1


def test_it_keeps_nothing_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        run = Run("O2")
        run.backward()
        grad, param = run.model.head.bias.grad, weakref.ref(run.model.head.bias)
        assert float(grad.norm()) > 0
        xamp.session(run.model).close()
        del run
    finally:
        gc.enable()
    gc.collect()
    assert param() is None
    with pytest.raises(StateError, match=r"it has been cleared since. Keep a copy"):
        grad.norm()


@pytest.mark.parametrize("clear", ["zero_grad", "by hand", "next backward"])
def test_one_that_was_kept_and_then_cleared_is_an_error_and_a_copy_is_not(clear: str) -> None:
    run = Run("O2")
    run.backward()
    grad, copied = run.model.head.bias.grad, run.model.head.bias.grad.clone()
    if clear == "zero_grad":
        run.optimizer.zero_grad()
    elif clear == "by hand":
        run.model.head.bias.grad = None
    else:
        run.backward()
    with pytest.raises(StateError, match=r"it has been cleared since. Keep a copy: param.grad.clone\(\)"):
        grad + 1.0
    assert float(copied.norm()) > 0.01


def test_it_outlives_the_optimizer() -> None:
    run = Run("O2")
    run.backward()
    del run.optimizer
    gc.collect()
    assert len(run.check()) == 2


def test_a_parameter_without_a_gradient_has_none_to_read() -> None:
    run = Run("O2")
    run.model.head.bias.requires_grad_(False)
    run.backward()
    assert not bool(run.model.head.bias.grad.any())


@pytest.mark.parametrize("level", MASTERS)
def test_where_the_step_is_one_pass(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onepass_reference.use(monkeypatch)
    run = Run(level, fused="one-pass")
    run.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.exact.load_state_dict({name: value.double() for name, value in run.model.state_dict().items()})
    run.exact.zero_grad()
    run.backward()
    assert xamp.session(run.model).engine.states[0].gradients.held is not None
    assert len(run.check()) == 2
    norm = float(xamp.clip_grad_norm_(run.optimizer, 1e9))
    xamp.clip_grad_norm_(run.optimizer, norm / 4)
    assert len(run.check(0.25)) == 2
    assert xamp.session(run.model).engine.states[0].gradients.held is not None


def test_what_a_step_in_one_pass_has_used_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    onepass_reference.use(monkeypatch)
    run = Run("O2", fused="one-pass")
    run.backward()
    gradients = xamp.session(run.model).engine.states[0].gradients
    gradients.end_step(drop_held=True)
    with pytest.raises(StateError, match=r"has used it up. Read it before optimizer.step"):
        run.model.head.bias.grad.norm()


@pytest.mark.parametrize("level", MASTERS)
def test_of_parameters_that_are_dtensors(level: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with one_rank():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        xamp.initialize(model, optimizer, level, verbosity=0)
        for _ in range(2):
            with xamp.scale_loss(model(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            found = [p for p in model.parameters() if p.grad is not None]
            assert len(found) == 2
            for param in found:
                grad: Any = param.grad
                master: Any = xamp.master_of(param)
                assert isinstance(grad, DTensor)
                assert torch.equal(grad.to_local(), master.grad.to_local())
                doubled: Any = grad * 2.0
                assert torch.equal(doubled.to_local(), 2.0 * master.grad.to_local())
                assert torch.equal(grad.full_tensor(), master.grad.full_tensor())
                assert bool(grad.to_local().any())
            optimizer.step()
        del model, optimizer, found, param, grad, master, doubled, scaled


# ---------------------------------------------------------------- from a parameter to its master


@pytest.mark.parametrize("level", LEVELS)
def test_the_master_of_a_parameter_is_what_the_optimizer_steps(level: str) -> None:
    run = Run(level)
    stepped = list(xamp.master_params(run.optimizer))
    run.backward()
    for (name, param), wanted in zip(run.model.named_parameters(), stepped, strict=True):
        found: Any = xamp.master_of(param)
        right: Any = run.exact.get_parameter(name).grad
        read = found.grad.double()
        assert found is wanted
        assert float((read - right).norm() / right.norm()) < 0.03


def test_a_master_that_no_backward_has_used_has_what_was_written_into_the_model() -> None:
    run = Run("O2")
    nn.init.ones_(run.model.head.bias)
    assert bool((xamp.master_of(run.model.head.bias) == 1.0).all())


def test_gradients_that_are_still_scaled_are_refused() -> None:
    run = Run("O2")
    i, y = batch()
    loss = nn.functional.cross_entropy(run.model(i).float(), y)
    with xamp.scale_loss(loss, run.optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(StateError, match=r"master_of\(param\): the gradients are still scaled"):
        xamp.master_of(run.model.head.bias)


def test_a_held_gradient_comes_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    onepass_reference.use(monkeypatch)
    run = Run("O2", fused="one-pass")
    run.backward()
    master, exact = xamp.master_of(run.model.head.bias), run.exact.head.bias
    assert master.grad is not None
    assert float((master.grad.double() - exact.grad).norm()) < 0.01
    run.optimizer.step()
    assert xamp.session(run.model).stats.applied == 1


def test_what_is_no_parameter_is_refused_and_what_no_session_has_is_itself() -> None:
    with pytest.raises(StateError, match=r"master_of\(param\): must be given a parameter of a model"):
        xamp.master_of("head.bias")  # type: ignore[arg-type]
    other = nn.Parameter(torch.ones(2))
    assert xamp.master_of(other) is other


def fgm(model: Any, optimizer: Any, number: int, scaled_by_xamp: bool) -> None:
    """One step of adversarial training: the embedding moves along its gradient, and back before the step."""
    i, y = batch(number)

    def backward() -> None:
        loss = nn.functional.cross_entropy(model(i).float() if scaled_by_xamp else model(i), y)
        if not scaled_by_xamp:
            loss.backward()
            return
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    optimizer.zero_grad()
    backward()
    weight: Any = xamp.master_of(model.emb.weight)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(weight.grad / weight.grad.norm(), alpha=2.0)
    backward()
    with torch.no_grad():
        weight.copy_(kept)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_adversarial_training_is_that_of_fp64(level: str) -> None:
    run = Run(level)
    by_hand = torch.optim.SGD(run.exact.parameters(), lr=0.125)
    first = run.exact.state_dict()["emb.weight"].clone()
    plain = copy.deepcopy(run.exact)
    plainly = torch.optim.SGD(plain.parameters(), lr=0.125)
    for number in range(6):
        fgm(run.model, run.optimizer, number, True)
        fgm(run.exact, by_hand, number, False)
        i, y = batch(number)
        plainly.zero_grad()
        (2 * nn.functional.cross_entropy(plain(i), y)).backward()
        plainly.step()
    found, wanted, without = (each.state_dict()["emb.weight"].double() for each in (run.model, run.exact, plain))
    moved = (wanted - first).norm()
    assert float((found - wanted).norm() / moved) < 0.05
    assert float((without - wanted).norm() / moved) > 0.1  # the attack counts


WRITES_BY_WAYS: dict[str, Callable[[Any], object]] = {
    "a view": lambda grad: grad.view(-1).mul_(0.5),
    "an element": lambda grad: grad[0].zero_(),
    "a slice": lambda grad: grad[0:1].fill_(1.0),
    "a chunk": lambda grad: grad.chunk(2)[0].add_(1.0),
    "a view of detach()": lambda grad: grad.detach().view(-1).zero_(),
    "a view of data": lambda grad: grad.data.view(-1).zero_(),
    "another data": lambda grad: setattr(grad, "data", grad.data.clamp(-1e-3, 1e-3)),
    "out=": lambda grad: torch.mul(grad, 0, out=grad),
}


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("way", WRITES_BY_WAYS)
def test_a_write_by_way_of_what_is_read_reaches_no_master_and_is_refused(way: str, level: str) -> None:
    """It would reach one or two of all masters."""
    run = Run(level)
    run.backward()
    before = [master.grad.clone() for master in xamp.master_params(run.optimizer) if master.grad is not None]
    for param in run.model.parameters():
        if param.grad is not None:
            WRITES_BY_WAYS[way](param.grad)
    state = run.optimizer._xamp.state  # type: ignore[attr-defined]
    assert all(map(torch.equal, (master.grad for _, master in state.gradients.params.pairs), before))
    for call in (run.optimizer.step, lambda: list(xamp.master_params(run.optimizer))):
        with pytest.raises(StateError):
            call()


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_under_ddp_it_is_read_at_any_moment(level: str, options: dict[str, Any]) -> None:
    """With ``gradient_as_bucket_view`` the second forward puts a copy in place of each gradient that there is."""
    with one_rank():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        xamp.initialize(model, optimizer, level, verbosity=0)
        ddp: Any = nn.parallel.DistributedDataParallel(model, **options)

        def check() -> None:
            found: list[Any] = [p for p in model.parameters() if p.grad is not None]
            masters: list[Any] = [xamp.master_of(p) for p in found]
            assert len(found) == 2
            for param, master in zip(found, masters, strict=True):
                assert torch.equal(param.grad.clone(), master.grad)
                assert bool(param.grad.any())

        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                loss = ddp(torch.ones(3, 4)).float().square().mean()
                if micro:
                    check()
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                check()
            ddp(torch.ones(3, 4))
            check()
            optimizer.step()
            check()


def test_a_model_whose_gradients_are_nan_may_be_moved() -> None:
    run = Run("O2")
    i, y = batch()
    loss = nn.functional.cross_entropy(run.model(i).float(), y) * float("inf")
    with xamp.scale_loss(loss, run.optimizer) as scaled:
        scaled.backward()
    before = [p.detach().clone() for p in run.model.parameters()]
    run.model._apply(lambda tensor: tensor.clone())  # as a move to another device
    run.optimizer.step()
    assert all(map(torch.equal, before, run.model.parameters()))
