"""xamp.autocast: torch.autocast to the bit, on the device in use, wherever and however it is entered.

Covers: xamp.casting.autocast.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from lanes import Lane, lower, needs_dtype
from managed_models import INSIDE, batch, net, ran_in, start
from table_ops import assert_equal
from torch import nn

import xamp
from xamp.casting import autocast as autocast_module
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.errors import BackendUnavailable, PolicyError, UnsupportedPolicy
from xamp.registry import device_in_use
from xamp.registry.registry import Registry

LOWER = (torch.float16, torch.bfloat16)
COMPILERS = ("eager", "aot_eager")

jit = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")


def state(kind: str = "cpu") -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", LOWER)
def test_a_training_step_is_that_of_torch_autocast_bit_for_bit(dtype: torch.dtype, lane: Lane) -> None:
    needs_dtype(lane, dtype)
    results = []
    regions: list[Callable[[], Any]] = [
        lambda: torch.autocast(lane.device.type, dtype=dtype),
        lambda: xamp.autocast(dtype=dtype),
        lambda: xamp.autocast(True, dtype),
    ]
    for region in regions:
        model = net(lane)
        with region():
            out, inside = model(batch(lane))
            loss = out.float().square().mean()  # in fp32, which not every device's own list has it in
        loss.backward()
        assert ran_in(inside) == dtype
        results.append((out, inside, loss, *(p.grad for p in model.parameters())))
    for mine in results[1:]:
        assert_equal(mine, results[0])


@pytest.mark.parametrize("cache_enabled", [True, False, None])
def test_the_cache_of_weight_casts_is_as_asked(cache_enabled: bool | None) -> None:
    for around in (True, False):
        torch.set_autocast_cache_enabled(around)
        try:
            with xamp.autocast(cache_enabled=cache_enabled):
                assert torch.is_autocast_cache_enabled() is (around if cache_enabled is None else cache_enabled)
            assert torch.is_autocast_cache_enabled() is around
        finally:
            torch.set_autocast_cache_enabled(True)


def test_cached_casts_do_not_outlive_it() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        with xamp.autocast(dtype=torch.bfloat16):
            assert float((x @ weight)[0, 0].detach()) == 2 * value


# ---------------------------------------------------------------- arguments


def test_its_arguments_are_those_of_torch_cuda_amp() -> None:
    # Of the class itself Python 3.13.0 finds no signature: torch has marked it as deprecated.
    theirs = [*inspect.signature(torch.cuda.amp.autocast.__init__).parameters.values()]
    *mine, more = inspect.signature(xamp.autocast.__init__).parameters.values()
    assert (more.name, more.default) == ("fp8", None)
    assert [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs]
    assert [p.default for p in mine if p.name != "dtype"] == [p.default for p in theirs if p.name != "dtype"]


def test_it_is_a_torch_autocast() -> None:
    made = xamp.autocast(dtype=torch.bfloat16)
    assert isinstance(made, torch.autocast)
    assert (made.device, made.fast_dtype) == ("cpu", torch.bfloat16)
    with made as entered:
        assert entered is made


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float16", 16])
def test_a_dtype_that_autocast_does_not_cast_to_is_refused_at_once(dtype: Any) -> None:
    with pytest.raises(
        PolicyError, match=r"autocast\(dtype=.*torch\.float16 or torch\.bfloat16; None.*enabled=False"
    ) as error:
        xamp.autocast(dtype=dtype)
    assert repr(dtype) in str(error.value)


def test_the_switch_is_read_as_python_reads_it_and_off_it_takes_any_dtype() -> None:
    offs: tuple[Any, ...] = (False, None, 0, "False")
    ons: tuple[Any, ...] = (1, "true", torch.tensor(True))
    for off in offs:
        for dtype in (torch.float32, torch.float64, None):
            with torch.autocast("cpu"), xamp.autocast(off, dtype):
                assert not torch.is_autocast_enabled("cpu")
    for on in ons:
        with xamp.autocast(enabled=on):
            assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("enabled", ["perhaps", lambda: None])
def test_a_switch_that_is_none_is_refused(enabled: Any) -> None:
    with pytest.raises(PolicyError, match=r"autocast\(enabled=.*True or False.*@xamp\.autocast\(\)"):
        xamp.autocast(enabled)


# ---------------------------------------------------------------- the device


def test_making_one_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "quipu")
    made = xamp.autocast(dtype=torch.bfloat16)

    @xamp.autocast()
    def decorated() -> bool:
        return torch.is_autocast_enabled("cpu")

    before = state()
    with pytest.raises(BackendUnavailable, match="XAMP_DEVICE=quipu"), made:
        pass
    assert state() == before
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    assert decorated()
    with made:
        assert state() == (True, torch.bfloat16, True)


def declare(monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> None:
    module = types.ModuleType("xamp_test_declared")
    made = {"capabilities": lambda self, device=None: Capabilities(dtypes=dtypes)}
    module.Declared = type("Declared", (Backend,), made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def use_backend(monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> None:
    declare(monkeypatch, *dtypes)
    registry = Registry((BackendSpec("declared", ("cpu",), "xamp_test_declared:Declared"),), None)
    monkeypatch.setattr("xamp.registry.device_in_use.REGISTRY", registry)


def test_a_dtype_that_the_device_cannot_do_is_refused_on_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "bfloat16")
    before = state()
    message = r"autocast\(\), whose dtype is float16: backend 'declared' cannot compute in it on cpu\. Lower dtypes"
    with pytest.raises(UnsupportedPolicy, match=message + r" there: bfloat16\. Pass dtype=torch\.bfloat16"):
        xamp.autocast().__enter__()
    with pytest.raises(UnsupportedPolicy, match=r"autocast\(dtype=torch\.float16\)"):
        xamp.autocast(dtype=torch.float16)(lambda: None)()
    assert state() == before
    with xamp.autocast(dtype=torch.bfloat16), xamp.autocast(enabled=False):
        pass
    use_backend(monkeypatch)
    with pytest.raises(UnsupportedPolicy, match=r"Lower dtypes there: none\. Pass enabled=False\."):
        xamp.autocast(dtype=torch.bfloat16).__enter__()


def test_a_backend_that_replaces_the_one_in_use_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "float16", "bfloat16")
    registry: Any = vars(device_in_use)["REGISTRY"]
    with xamp.autocast(dtype=torch.float16):
        pass
    before = device_in_use.in_use()
    assert device_in_use.in_use() is before

    declare(monkeypatch, "bfloat16")
    registry.register(BackendSpec("declared", ("cpu",), "xamp_test_declared:Declared"), override=True)
    assert device_in_use.in_use() is not before
    with pytest.raises(UnsupportedPolicy, match=r"autocast\(dtype=torch\.float16\): backend 'declared' cannot"):
        xamp.autocast(dtype=torch.float16).__enter__()


# ---------------------------------------------------------------- entering and leaving


def test_an_exception_leaves_the_state_as_it_was() -> None:
    for around in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)):
        with around:
            before = state()
            with pytest.raises(KeyError), xamp.autocast(dtype=torch.bfloat16):
                raise KeyError
            assert state() == before


def test_one_object_nests_in_itself_and_in_torchs() -> None:
    mine = xamp.autocast(dtype=torch.bfloat16)
    theirs = torch.autocast("cpu", dtype=torch.float16)
    outside = state()
    with mine:
        with xamp.autocast(enabled=False):
            assert not state()[0]
            with mine, mine:
                assert state()[:2] == (True, torch.bfloat16)
            assert not state()[0]
        with theirs:
            assert state()[:2] == (True, torch.float16)
            with mine:
                assert state()[:2] == (True, torch.bfloat16)
            assert state()[:2] == (True, torch.float16)
        assert state()[:2] == (True, torch.bfloat16)
    assert state() == outside


def test_a_decorated_function_calls_itself() -> None:
    @xamp.autocast(dtype=torch.bfloat16)
    def fall(depth: int) -> list[bool]:
        if depth == 0:
            return []
        with torch.autocast("cpu", enabled=False):
            return [*fall(depth - 1), torch.is_autocast_enabled("cpu")]

    before = state()
    assert fall(3) == [False, False, False]
    assert state() == before


def test_one_object_serves_two_threads() -> None:
    """Both are inside at once, and the one that entered first leaves first."""
    shared = xamp.autocast(dtype=torch.bfloat16)
    turn = threading.Barrier(2)
    found: dict[str, list[object]] = {"first": [], "second": []}

    def pause(times: int) -> None:
        for _ in range(times):
            turn.wait(30)

    @shared
    def work(name: str, before: int, inside: int) -> None:
        with torch.autocast("cpu", enabled=False):
            pause(before)
            with shared:
                found[name].append(state()[:2])
                pause(inside)
            found[name].append(state()[0])

    def run(name: str, *pauses: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=name == "first"):
            before = state()
            work(name, *pauses)
            found[name].append(state() == before)
        pause(3 - sum(pauses))

    threads = [threading.Thread(target=run, args=args) for args in (("first", 0, 2), ("second", 1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {name: [(True, torch.bfloat16), False, True] for name in found}


# ---------------------------------------------------------------- as a decorator


def test_a_decorated_function_keeps_its_name_and_signature() -> None:
    @xamp.autocast(dtype=torch.bfloat16)
    def product(a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return a @ b

    assert (product.__name__, product.__doc__) == ("product", "Multiply.")
    assert list(inspect.signature(product).parameters) == ["a", "b"]
    x = torch.ones(2, 2)
    assert product(x, b=x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


class Decorated(nn.Linear):
    @xamp.autocast(dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_method_is_decorated() -> None:
    model = Decorated(2, 2)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert pickle.loads(pickle.dumps(xamp.autocast(dtype=torch.bfloat16)))(model.forward)


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [generator, coroutine, async_generator])
def test_what_would_run_after_the_region_was_left_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError, match=rf"autocast\(\)\({function.__name__}\): a generator or coroutine.*inside it"):
        xamp.autocast()(function)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"autocast\(\)\(3\): decorates functions.*with xamp\.autocast\(\)"):
        xamp.autocast()(3)  # type: ignore[type-var]


# ---------------------------------------------------------------- with initialize


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_in_the_forward_of_a_managed_model_it_decides(level: str, lane: Lane) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 8)  # for a dtype of its own

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = x @ x.T
            with xamp.autocast(dtype=lower(lane)):
                inner = x @ x.T
            with xamp.autocast(enabled=False):
                plain = x @ x.T
            return before.double(), inner.double(), plain.double(), (x @ x.T).double()

    model = start(Model().to(lane.device), level, lane)
    own = torch.float16 if level == "O2" else torch.float32
    found = [ran_in(values) for values in model(batch(lane))]
    assert found == [INSIDE[level], lower(lane), own, INSIDE[level]]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_the_sessions_region_is_one_of_them(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane)
    region: Any = xamp.session(model).autocast()
    x = batch(lane)
    dtype = INSIDE[level] if level in ("O1", "O4") else torch.float32

    product = region(lambda: (x @ x.T).dtype)

    with torch.autocast(lane.device.type, dtype=lower(lane)):
        before = state(lane.device.type)
        with region, region:
            assert (x @ x.T).dtype == dtype
        assert product() == dtype
        assert state(lane.device.type) == before


# ---------------------------------------------------------------- tracing


class Products(nn.Module):
    """What several regions make of a product."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        with xamp.autocast(dtype=torch.float16):
            half = x @ x
            with xamp.autocast(enabled=False):
                plain = x @ x
            with xamp.autocast(dtype=torch.bfloat16):
                lower = x @ x
            again = x @ x
        return [half, plain, lower, again, x @ x]


@pytest.fixture
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where disable_casts and registrations were never touched: then strict export has nothing to warn of."""
    monkeypatch.setattr("xamp.casting.features_in_use.needs.marks", False)


MADE_BEFORE = xamp.autocast(dtype=torch.bfloat16)


@xamp.autocast(dtype=torch.bfloat16)
def decorated(x: torch.Tensor) -> list[torch.Tensor]:
    return [x @ x, *Products()(x)]


def made_before(x: torch.Tensor) -> list[torch.Tensor]:
    with MADE_BEFORE:
        inside = x @ x
    return [inside, x @ x]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("function", [Products(), decorated, made_before], ids=["inside", "decorator", "made before"])
def test_a_compiled_function_that_enters_it_is_one_graph(function: Callable[..., Any], compiler: str) -> None:
    x = torch.randn(4, 4)
    # A graph ends at a block that was made before, where the portable policy adds to the device's list.
    compiled: Any = torch.compile(function, fullgraph=function is not made_before, backend=compiler)
    for around in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.float16)):
        with around:
            expected = function(x)
            for _ in range(2):
                assert_equal(compiled(x), expected)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compiled_model_runs_inside_it(compiler: str, lane: Lane) -> None:
    model = net(lane).eval()
    compiled: Any = torch.compile(model, fullgraph=True, backend=compiler)
    x = batch(lane)
    assert ran_in(compiled(x)[1]) == torch.float32
    with xamp.autocast(dtype=lower(lane)):
        assert_equal(compiled(x), model(x))
        assert ran_in(compiled(x)[1]) == lower(lane)
    assert ran_in(compiled(x)[1]) == torch.float32


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.usefixtures("_nobody_asks")
def test_an_exported_program_holds_it(strict: bool) -> None:
    model, x = Products(), torch.randn(4, 4)
    made = torch.export.export(model, (x,), strict=strict).module()(x)
    assert [t.dtype for t in made] == [t.dtype for t in model(x)]


@jit
@pytest.mark.parametrize("dtype", LOWER)
def test_a_model_traced_inside_it_is_what_torch_traces(dtype: torch.dtype, lane: Lane) -> None:
    needs_dtype(lane, dtype)
    model, x = net(lane).eval(), batch(lane)
    outs = []
    for region in (torch.autocast(lane.device.type, dtype=dtype), xamp.autocast(dtype=dtype)):
        with region:
            traced = torch.jit.trace(model, (x,), check_trace=False)
        outs.append(traced(x))
    assert ran_in(outs[1][1]) == dtype
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_regions_that_generators_leave_out_of_order_end_with_what_was_before(lane: Lane) -> None:
    def batches() -> Generator[None]:
        with xamp.autocast():
            yield

    held = batches()
    next(held)
    with xamp.autocast(False):
        held.close()
    assert not torch.is_autocast_enabled(lane.device.type)


def test_leaving_what_was_not_entered_is_refused() -> None:
    with pytest.raises(xamp.StateError, match=r"autocast.__exit__\(\): this thread is in no region to leave"):
        xamp.autocast().__exit__(None, None, None)


@pytest.mark.parametrize("spelt", [{"dtype": torch.float32}, {"device_type": "cpu", "dtype": torch.float32}])
def test_float32_warns_and_is_off_as_torchs_is_on_a_cpu(spelt: dict[str, Any]) -> None:
    x = torch.ones(2, 2)
    with pytest.warns(UserWarning, match=r"casts nothing: it is autocast\(enabled=False\)") as told:
        region = xamp.autocast(**spelt)
    assert told[0].filename == __file__
    with torch.autocast("cpu"), region:
        assert (x @ x).dtype is torch.float32
    xamp.autocast(enabled=False, dtype=torch.float32)  # is off anyway, and says nothing


def test_errors_are_of_torchs_class_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError) as told:
        xamp.autocast()(3)  # type: ignore[type-var]
    assert isinstance(told.value, xamp.PolicyError)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda _: False)
    with pytest.raises(RuntimeError, match="torch has no autocast") as refused:
        autocast_module._find_mark(True, None, device_in_use.in_use())
    assert isinstance(refused.value, xamp.UnsupportedPolicy)
