"""custom_fwd and custom_bwd: torch's to the bit, without naming a device.

Covers: xamp.casting.custom_function.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lanes import Lane, lower
from table_ops import assert_equal

import xamp
from xamp.errors import StateError

CASTS = (None, torch.float32, torch.bfloat16)
Decorators = tuple[Callable[..., Any], Callable[..., Any]]


def apply(function: Any) -> Callable[..., Any]:
    """``function.apply``, which torch has given no types."""
    return function.apply  # type: ignore[no-any-return]


def torchs(kind: str, cast_inputs: torch.dtype | None) -> Decorators:
    return torch.amp.custom_fwd(device_type=kind, cast_inputs=cast_inputs), torch.amp.custom_bwd(device_type=kind)


def xamps(kind: str, cast_inputs: torch.dtype | None) -> Decorators:
    if cast_inputs is None:
        return xamp.custom_fwd, xamp.custom_bwd
    return xamp.custom_fwd(cast_inputs=cast_inputs), xamp.custom_bwd


def product(decorators: Decorators, method: Any = staticmethod) -> Any:
    """A product that saves its inputs, and keeps under which state its backward ran."""
    fwd, bwd = decorators
    ran: list[tuple[bool, torch.dtype]] = []

    @fwd
    def forward(*args: Any) -> Any:
        *_, ctx, x, more = args
        ctx.save_for_backward(x, more["weight"])
        return x @ more["weight"]

    @bwd
    def backward(*args: Any) -> Any:
        *_, ctx, grad = args
        x, weight = ctx.saved_tensors
        kind = x.device.type
        ran.append((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        return grad @ weight.t(), None

    methods = {"ran": ran, "forward": method(forward), "backward": method(backward)}
    return type("Product", (torch.autograd.Function,), methods)


def run(function: Any, kind: str, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(4, 4, generator=generator).to(kind) for _ in range(2))
    x.requires_grad_()
    with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        y = function.apply(x, {"weight": weight})
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
@pytest.mark.parametrize("cast_inputs", CASTS)
def test_forward_and_backward_are_torchs_bit_for_bit(
    cast_inputs: torch.dtype | None, dtype: torch.dtype | None, lane: Lane
) -> None:
    kind = lane.device.type
    mine, theirs = product(xamps(kind, cast_inputs)), product(torchs(kind, cast_inputs))
    assert_equal(run(mine, kind, dtype), run(theirs, kind, dtype))
    assert mine.ran == theirs.ran


@pytest.mark.parametrize("which", [(0, 1), (1, 0)], ids=["xamp's forward", "torch's forward"])
def test_one_of_torchs_and_one_of_xamps_go_together(which: tuple[int, int]) -> None:
    pairs = (xamps("cpu", None), torchs("cpu", None))
    mixed = product((pairs[which[0]][0], pairs[which[1]][1]))
    assert_equal(run(mixed, "cpu", torch.bfloat16), run(product(torchs("cpu", None)), "cpu", torch.bfloat16))
    assert mixed.ran == [(True, torch.bfloat16)]


def test_their_arguments_are_those_of_torch_cuda_amp() -> None:
    for name in ("custom_fwd", "custom_bwd"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs = inspect.signature(getattr(torch.cuda.amp, name)).parameters.values()
        mine = [p for p in inspect.signature(getattr(xamp, name)).parameters.values() if p.name != "device_type"]
        assert [(p.name, p.kind, p.default) for p in mine] == [
            (p.name, p.kind, None if p.name == "bwd" else p.default) for p in theirs
        ]


def test_the_decorator_may_stand_outside_of_staticmethod() -> None:
    class Twice(torch.autograd.Function):
        @xamp.custom_fwd(cast_inputs=torch.float32)
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @xamp.custom_bwd
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with xamp.autocast():
        y = apply(Twice)(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("cast_inputs", CASTS)
@pytest.mark.parametrize("whose", ["xamp", "torch's forward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_class_methods_are_taken_as_torchs_are(
    dtype: torch.dtype | None, whose: str, cast_inputs: torch.dtype | None
) -> None:
    """Then the class is the first argument, and the context the second."""
    theirs, own = torchs("cpu", cast_inputs), xamps("cpu", cast_inputs)
    mine = product((own if whose == "xamp" else theirs)[:1] + own[1:], classmethod)
    other = product(theirs, classmethod)
    assert_equal(run(mine, "cpu", dtype), run(other, "cpu", dtype))
    assert mine.ran == other.ran


class WithSetup(torch.autograd.Function):
    """The style without a context in forward, which torch's custom_bwd does not take."""

    ran: list[tuple[bool, torch.dtype]] = []

    @staticmethod
    @xamp.custom_fwd
    def forward(factor: float, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return factor * (x @ weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.factor, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @xamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        WithSetup.ran.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return None, ctx.factor * (grad @ weight.t()), ctx.factor * (x.t() @ grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_a_forward_without_context_is_taken(dtype: torch.dtype | None) -> None:
    WithSetup.ran.clear()
    x, weight = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
        y = apply(WithSetup)(2.0, x, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):  # another state, another context
            other = apply(WithSetup)(2.0, x, weight)
    y.float().sum().backward()
    assert y.dtype == (dtype or torch.float32)
    assert WithSetup.ran == [(dtype is not None, dtype or torch.float16)]
    other.float().sum().backward()
    assert WithSetup.ran[1][0] is (dtype is None)
    assert vars(x) == vars(weight) == {}, "nothing is noted on the tensors"


class Bare(WithSetup):
    """Its forward is not decorated, while ``setup_context`` and backward are those of a class whose forward is."""

    @staticmethod
    def forward(factor: float, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return factor * (x @ weight)


def test_it_does_not_take_the_state_of_another_forward() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with xamp.autocast(dtype=torch.bfloat16):
        apply(WithSetup)(2.0, x, x)
    with pytest.raises(StateError, match="not known"):
        apply(Bare)(2.0, x, x).sum().backward()


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True
    ran: list[bool] = []

    @staticmethod
    @xamp.custom_fwd
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @xamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Cubed.ran.append(torch.is_autocast_enabled("cpu"))
        x: torch.Tensor = ctx.saved_tensors[0]
        return grad * 3 * x * x


@pytest.mark.parametrize("on", [True, False])
def test_torch_func_gets_a_context_of_its_own(on: bool) -> None:
    """``torch.func`` calls ``setup_context`` once for each of its levels, after one forward."""
    Cubed.ran.clear()
    x = torch.tensor([1.0, 2.0, 3.0])

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.sum(apply(Cubed)(values))

    with xamp.autocast(dtype=torch.bfloat16, enabled=on):
        grads = torch.func.grad(total)(x)
        rows = torch.vmap(torch.func.grad(total))(torch.stack([x, 2 * x]))
        second = torch.func.jacrev(torch.func.grad(total))(x)
    assert grads.tolist() == [3.0, 12.0, 27.0]
    assert rows.tolist() == [[3.0, 12.0, 27.0], [12.0, 48.0, 108.0]]
    assert second.tolist() == [[6.0, 0.0, 0.0], [0.0, 12.0, 0.0], [0.0, 0.0, 18.0]]
    assert set(Cubed.ran) == {on}


def test_such_a_forward_may_run_another_one() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        @xamp.custom_fwd(cast_inputs=torch.float32)
        def forward(x: torch.Tensor) -> Any:
            return apply(WithSetup)(1.0, x, x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
            pass

        @staticmethod
        @xamp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled("cpu")
            return grad

    x = torch.ones(2, 2, requires_grad=True)
    with xamp.autocast(dtype=torch.bfloat16):
        y = apply(Outer)(x)
    y.sum().backward()
    assert y.dtype == torch.float32


def test_a_forward_without_decorator_leaves_the_state_unknown() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

        @staticmethod
        @xamp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 0.5

    y = apply(Half)(torch.ones(2, requires_grad=True))
    with pytest.raises(StateError, match=r"custom_bwd\(.*Half\.backward\).*not known.*@xamp\.custom_fwd.*ctx"):
        y.sum().backward()


def test_the_device_is_that_of_the_tensors(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is in use, and whatever host tensors come first."""
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        @xamp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x * 1.0

    monkeypatch.setenv("XAMP_DEVICE", "quipu")  # is not asked for
    x = torch.ones(2, dtype=lower(lane), device=lane.device)
    with torch.autocast(lane.device.type, dtype=lower(lane)):
        apply(Probe)(torch.ones(1, dtype=torch.int64), x)
    apply(Probe)(torch.ones(1, dtype=torch.int64), x)
    assert seen == [torch.float32, lower(lane)]


def test_without_tensors_it_is_the_device_in_use() -> None:
    class Zeros(torch.autograd.Function):
        @staticmethod
        @xamp.custom_fwd
        def forward(ctx: Any, size: int) -> torch.Tensor:
            assert ctx._fwd_used_autocast is True
            return torch.zeros(size)

    with xamp.autocast(dtype=torch.bfloat16):
        assert apply(Zeros)(3).shape == (3,)


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_do_not_see_each_others_forwards() -> None:
    wrong: list[object] = []

    def work(dtype: torch.dtype) -> None:
        for _ in range(200):
            x = torch.randn(3, 3, requires_grad=True)
            with torch.autocast("cpu", dtype=dtype):
                y = apply(WithSetup)(1.0, x, x)
            if y.dtype != dtype or y.grad_fn._dtype != dtype:
                wrong.append(y.dtype)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (torch.float16, torch.bfloat16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


class Traced(torch.autograd.Function):
    @staticmethod
    @xamp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @xamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad @ x.t() + x.t() @ grad


class TracedWithSetup(torch.autograd.Function):
    """No test runs it eagerly first."""

    @staticmethod
    @xamp.custom_fwd(cast_inputs=torch.float32)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    @xamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].float()
        return grad @ x.t() + x.t() @ grad


class Inheriting(TracedWithSetup):
    """Its forward was decorated in another class."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)


class Forward:
    """A mixin, which is no Function itself."""

    @staticmethod
    @xamp.custom_fwd(cast_inputs=torch.float32)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x


class MixedIn(Forward, torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    @xamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].float()
        return grad @ x.t() + x.t() @ grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [Traced, TracedWithSetup, Inheriting, MixedIn])
def test_a_compiled_function_uses_it_in_one_graph(function: Any, compiler: str) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = apply(function)(x * 1.0)
        return made

    compiled: Any = torch.compile(run, fullgraph=True, backend=compiler)
    results = []
    for called in (compiled, run):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with xamp.autocast(dtype=torch.bfloat16):
            y = called(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert results[0][0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("named", [False, True])
def test_torchs_spellings_with_a_device_type_and_parentheses(named: bool) -> None:
    """A device type that is named is the one whose autocast counts, in forward and backward."""
    options: Any = {"device_type": "xpu"} if named else {}
    seen: list[tuple[torch.dtype, bool]] = []

    class Own(torch.autograd.Function):
        @staticmethod
        @xamp.custom_fwd(cast_inputs=torch.float32, **options)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        @xamp.custom_bwd(**options)  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((grad.dtype, torch.is_autocast_enabled("cpu")))
            return grad

    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu"):
        Own.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    own = torch.float16 if named else torch.float32
    assert seen == [(own, named), (own, named)]
