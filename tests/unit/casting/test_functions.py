"""Decorated and registered functions, and blocks without casts: in xamp's regions, and never elsewhere.

Covers: xamp.casting.functions, xamp.casting.registered, xamp.casting.script.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_python import python
from lanes import Lane
from managed_models import start
from torch import nn

import xamp
from xamp.casting import registered
from xamp.errors import PolicyError

REGISTER: dict[str, Callable[[Any, str], None]] = {
    "half": xamp.register_half_function,
    "float": xamp.register_float_function,
    "promote": xamp.register_promote_function,
}
DECORATE: dict[str, Callable[..., Any]] = {
    "half": xamp.half_function,
    "float": xamp.float_function,
    "promote": xamp.promote_function,
}
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

jit = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    registered._unregister_all()


@pytest.fixture
def user(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A module of the user's, which can be imported."""
    module = types.ModuleType(f"xamp_test_{request.node.name.partition('[')[0]}")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def ones(dtype: torch.dtype = FP32, requires_grad: bool = False) -> torch.Tensor:
    return torch.ones(2, 2, dtype=dtype, requires_grad=requires_grad)


class Calls(nn.Module):
    """Calls a function in its forward, and says what came of it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.function(self.inner(x).float())
        self.dtypes.append(made.dtype)
        return made.double()


# ---------------------------------------------------------------- decorators

INSIDE = {"half": BF16, "float": FP32, "promote": FP32}


@pytest.mark.parametrize("kind", DECORATE)
def test_a_decorated_function_acts_wherever_autocast_is_on(kind: str) -> None:
    @DECORATE[kind]
    def arguments(x: torch.Tensor, *, pair: tuple[torch.Tensor, ...]) -> list[torch.dtype]:
        """Says."""
        return [x.dtype, *(t.dtype for t in pair), (x @ x).dtype]

    def run() -> Any:
        return arguments(ones(BF16), pair=(ones(), ones(FP64), ones(torch.int64), ones(torch.complex64)))

    untouched = [FP64, torch.int64, torch.complex64]
    outside = [BF16, FP32, *untouched, BF16]
    dtype = INSIDE[kind]
    inside = [dtype, dtype, *untouched, FP32 if kind == "float" else BF16]
    assert run() == outside
    for region in (torch.autocast("cpu", dtype=BF16), xamp.autocast(dtype=BF16)):
        with region:
            assert run() == inside
            with torch.autocast("cpu", enabled=False):
                assert run() == outside
    assert arguments.__name__ == "arguments"
    assert arguments.__doc__ == "Says."


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_in_a_managed_model_it_acts_where_operators_are_cast(level: str, lane: Lane) -> None:
    seen = []

    @xamp.half_function
    def half(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    @xamp.float_function
    def full(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    model = start(Calls(lambda x: full(half(x))).to(lane.device), level, lane)
    model(torch.randn(2, 4).to(lane.device))
    assert seen == [{"O1": FP16, "O4": BF16}.get(level, FP32), FP32]


def test_promotion_is_to_the_widest_of_what_is_there() -> None:
    @xamp.promote_function
    def dtypes(*tensors: torch.Tensor) -> list[torch.dtype]:
        return [t.dtype for t in tensors]

    with torch.autocast("cpu", dtype=FP16):
        assert dtypes(ones(FP16), ones(FP16)) == [FP16, FP16]
        assert dtypes(ones(FP16), ones(FP32)) == [FP32, FP32]
        assert dtypes(ones(FP16), ones(BF16)) == [FP32, FP32]
        assert dtypes(ones(BF16), ones(FP64)) == [BF16, FP64]
    assert dtypes(ones(FP16), ones(FP32)) == [FP16, FP32]


def test_gradients_flow_through_the_casts() -> None:
    x = ones(requires_grad=True)

    @xamp.half_function
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    with torch.autocast("cpu", dtype=BF16):
        made = square(x)
    assert made.dtype == BF16
    made.float().sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (FP32, [[2.0, 2.0], [2.0, 2.0]])


def test_weights_that_the_users_function_holds_are_cast_too() -> None:
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=BF16):
        assert xamp.half_function(lambda x: layer(x))(ones()).dtype == BF16
        assert xamp.half_function(layer.forward)(ones()).dtype == BF16
        assert xamp.half_function(layer)(ones()).dtype == BF16
        assert xamp.float_function(lambda x: layer(x))(ones(BF16)).dtype == FP32


def test_torchs_own_list_does_not_undo_the_choice() -> None:
    """mse_loss gives fp32 and mm gives bf16 in that list."""
    with torch.autocast("cpu", dtype=BF16):
        assert F.mse_loss(ones(BF16), ones(BF16)).dtype == FP32
        assert xamp.half_function(F.mse_loss)(ones(), ones()).dtype == BF16
        assert xamp.half_function(functools.partial(F.mse_loss, ones(BF16)))(ones()).dtype == BF16
        assert xamp.float_function(torch.mm)(ones(BF16), ones()).dtype == FP32
        assert xamp.promote_function(torch.mm)(ones(BF16), ones()).dtype == FP32
        assert xamp.promote_function(torch.mm)(ones(BF16), ones(BF16)).dtype == BF16


def test_what_is_written_into_is_no_copy() -> None:
    result = ones()
    with torch.autocast("cpu", dtype=BF16):
        xamp.half_function(torch.exp)(torch.zeros(2, 2), out=result.zero_())
    assert result.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("kind", DECORATE)
def test_a_class_cannot_be_decorated(kind: str) -> None:
    with pytest.raises(PolicyError, match=rf"{kind}_function\(.*Linear.*\): decorates functions.*its methods"):
        DECORATE[kind](nn.Linear)


# ---------------------------------------------------------------- registrations


@pytest.mark.parametrize(("level", "dtype"), [("O0", FP32), ("O1", FP16), ("O2", FP32), ("O4", BF16)])
def test_a_registered_function_acts_in_models_at_o1_and_o4(level: str, dtype: torch.dtype, lane: Lane) -> None:
    xamp.register_half_function(F, "softmax")
    model = start(Calls(lambda x: F.softmax(x, -1)).to(lane.device), level, lane)
    x = torch.randn(2, 4).to(lane.device)
    model(x)
    copy.deepcopy(model)(x)
    assert model.dtypes == [dtype]
    assert F.softmax(x, -1).dtype == FP32


@pytest.mark.parametrize("kind", REGISTER)
def test_it_is_what_it_was_everywhere_else(kind: str) -> None:
    before = F.softmax
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=BF16):
        expected = [F.softmax(x, -1), F.softmax(x.bfloat16(), -1)]
    REGISTER[kind](F, "softmax")
    assert F.softmax is not before
    with torch.autocast("cpu", dtype=BF16):
        for made, same in zip([F.softmax(x, -1), F.softmax(x.bfloat16(), -1)], expected, strict=True):
            assert made.dtype == same.dtype
            assert torch.equal(made, same)
    assert F.softmax(x, dim=-1, dtype=FP64).dtype == FP64
    with pytest.raises(TypeError, match=r"softmax\(\)"):
        F.softmax()  # type: ignore[call-arg]
    registered._unregister_all()
    assert F.softmax is before


def test_of_torchs_own_it_overrules_what_the_device_lists() -> None:
    xamp.register_half_function(F, "mse_loss")
    with xamp.autocast(dtype=BF16):
        assert F.mse_loss(ones(), ones()).dtype == BF16
    with torch.autocast("cpu", dtype=BF16):
        assert F.mse_loss(ones(), ones()).dtype == FP32


def test_it_acts_in_every_region_of_xamps() -> None:
    model = xamp.initialize(nn.Linear(2, 2), level="O4", verbosity=0)
    plain = xamp.initialize(nn.Linear(2, 2), level="O0", verbosity=0)
    xamp.register_half_function(torch, "cumsum")  # at once: the models need not come later
    session: Any = xamp.session(model)
    off = xamp.session(plain)

    def made() -> torch.dtype:
        return torch.cumsum(ones(), 0).dtype

    with session.autocast():
        assert made() == BF16
        with torch.autocast("cpu", enabled=False):
            assert made() == FP32
        with torch.autocast("cpu", dtype=FP16):
            assert made() == FP16
        with xamp.autocast(enabled=False):
            assert made() == FP32
        assert session.autocast()(made)() == BF16
    with xamp.autocast():
        assert made() == FP16
        with xamp.autocast(enabled=False), torch.autocast("cpu", dtype=BF16):
            assert made() == FP32, "a foreign region in a region without casts"
    with torch.autocast("cpu", dtype=BF16):
        assert made() == FP32
        with off.autocast():
            assert made() == FP32
        with xamp.autocast(dtype=FP16):
            assert made() == FP16
        assert made() == FP32


def test_registered_again_it_takes_the_new_kind() -> None:
    xamp.register_half_function(torch, "mm")
    once = torch.mm
    with xamp.autocast(dtype=BF16):
        assert torch.mm(ones(), ones()).dtype == BF16
        xamp.register_float_function(torch, "mm")
        assert torch.mm(ones(), ones()).dtype == FP32
        xamp.register_half_function(torch, "mm")
        assert torch.mm(ones(), ones()).dtype == BF16
    assert torch.mm is once, "wrappers do not stack"


def test_one_that_somebody_put_back_is_replaced_again() -> None:
    before = torch.cumsum
    xamp.register_half_function(torch, "cumsum")
    torch.cumsum = before
    xamp.register_half_function(torch, "cumsum")
    with xamp.autocast(dtype=BF16):
        assert torch.cumsum(ones(), 0).dtype == BF16
    registered._unregister_all()
    assert torch.cumsum is before


def test_one_that_was_imported_by_name_since_is_not_wrapped_twice(user: Any) -> None:
    xamp.register_half_function(F, "softmax")
    user.softmax = F.softmax
    xamp.register_float_function(user, "softmax")
    with xamp.autocast(dtype=BF16):
        assert user.softmax(ones(BF16), -1).dtype == FP32
        assert F.softmax(ones(), -1).dtype == BF16


def test_a_wrapper_of_the_users_around_it_is_the_users(user: Any) -> None:
    xamp.register_half_function(torch, "cumsum")
    inner = torch.cumsum

    @functools.wraps(inner)
    def doubled(*args: Any) -> torch.Tensor:
        return 2 * inner(*args)

    user.cumsum = doubled
    xamp.register_float_function(user, "cumsum")
    assert user.cumsum(ones(), 0).tolist() == [[2.0, 2.0], [4.0, 4.0]]


def test_a_function_of_the_users_runs_with_autocast_on(user: Any) -> None:
    layer = nn.Linear(2, 2)
    user.run = lambda x: (x.dtype, layer(x).dtype)
    xamp.register_half_function(user, "run")
    with xamp.autocast(dtype=BF16):
        assert user.run(ones()) == (BF16, BF16)
    xamp.register_float_function(user, "run")
    with xamp.autocast(dtype=BF16):
        assert user.run(ones(BF16)) == (FP32, FP32)


class Methods(nn.Module):
    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def run(self, x: torch.Tensor) -> tuple[Any, ...]:
        return type(self), x.dtype, self.layer(x).dtype

    @staticmethod
    def still(x: torch.Tensor) -> tuple[Any, ...]:
        return Methods, x.dtype, (x @ x).dtype

    @classmethod
    def shared(cls, x: torch.Tensor) -> tuple[Any, ...]:
        return cls, x.dtype, (x @ x).dtype


class Inherits(Methods):
    pass


@pytest.mark.parametrize("name", ["run", "still", "shared"])
def test_a_method_of_a_class_is_registered(name: str) -> None:
    xamp.register_half_function(Inherits, name)
    model = Inherits()
    kind = Methods if name == "still" else Inherits
    with xamp.autocast(dtype=BF16):
        assert getattr(model, name)(ones()) == (kind, BF16, BF16)
        assert getattr(Methods(), name)(ones())[1] == FP32, "the base class is not registered"
    assert getattr(model, name)(ones()) == (kind, FP32, FP32)
    registered._unregister_all()
    assert name not in vars(Inherits)


def test_a_method_of_a_tensor_is_registered() -> None:
    xamp.register_half_function(torch.Tensor, "softmax")
    with xamp.autocast(dtype=BF16):
        assert ones().softmax(-1).dtype == BF16
        assert nn.Parameter(ones()).softmax(dim=-1).dtype == BF16
    assert ones().softmax(-1).dtype == FP32


def test_a_partial_object_keeps_its_attributes(user: Any) -> None:
    user.normal = functools.partial(F.softmax, dim=-1)
    xamp.register_half_function(user, "normal")
    assert user.normal.func is F.softmax
    assert user.normal.keywords == {"dim": -1}
    with xamp.autocast(dtype=BF16):
        assert user.normal(ones()).dtype == BF16
        assert copy.deepcopy(user.normal)(ones()).dtype == BF16
    assert pickle.loads(pickle.dumps(user.normal))(ones()).dtype == FP32


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    with torch.library._scoped_library("xamp_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("xamp_test::twice", lambda x: torch.empty_like(x), lib=library)
        yield torch.ops.xamp_test


def test_an_operator_of_a_library_keeps_its_overloads(operators: Any) -> None:
    xamp.register_half_function(operators, "twice")
    with xamp.autocast(dtype=BF16):
        assert operators.twice(ones()).dtype == BF16
        assert operators.twice.default(ones()).dtype == FP32
    assert operators.twice(ones()).dtype == FP32
    assert operators.twice.overloads() == ["default"]


def test_a_function_that_is_not_there_is_refused_in_apexs_words() -> None:
    for register in REGISTER.values():
        with pytest.raises(PolicyError) as error:
            register(F, "softmux")
        assert str(error.value) == f"No function named softmux in module {F}. Did you mean 'softmax'?"
        assert isinstance(error.value, ValueError)
        with pytest.raises(PolicyError, match=r"^No function named qqqqqqqqqq in module [^?]*\.$"):
            register(F, "qqqqqqqqqq")


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (nn, "Linear", r"register_half_function\(torch\.nn, 'Linear'\): this is a class.*\(Linear, 'forward'\)"),
        (torch, "pi", r"register_half_function\(torch, 'pi'\): this is no function but float"),
        (torch.Tensor, "exp_", r"register_half_function\(Tensor, 'exp_'\): it writes into its argument.*'exp'"),
        (F, "relu_", r"it writes into its argument.*'relu'"),
        (dict, "copy", r"register_half_function\(dict, 'copy'\): it cannot be replaced there"),
    ],
)
def test_what_cannot_be_registered_is_refused(module: Any, name: str, message: str) -> None:
    before = getattr(module, name)
    with pytest.raises(PolicyError, match=message):
        xamp.register_half_function(module, name)
    assert getattr(module, name) is before or getattr(module, name) == before


# ---------------------------------------------------------------- what looks at functions


@pytest.mark.parametrize(("holder", "name"), [(F, "softmax"), (torch, "cumsum"), (torch, "einsum")])
def test_it_pickles_by_its_name(holder: Any, name: str) -> None:
    xamp.register_half_function(holder, name)
    made = getattr(holder, name)
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.deepcopy(made) is made


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1) + torch.cumsum(x, 0) + F.max_pool2d(x[None], 1)[0]


@jit
def test_torchscript_compiles_the_function_itself() -> None:
    x = torch.randn(4, 4)
    expected = Scripted()(x)
    for holder, name in ((F, "softmax"), (torch, "cumsum"), (F, "max_pool2d")):
        xamp.register_half_function(holder, name)
    assert torch.equal(torch.jit.script(Scripted())(x), expected)
    registered._unregister_all()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()  # compile it anew
    assert torch.equal(torch.jit.script(Scripted())(x), expected)


def test_torchscript_takes_no_later_function_for_a_wrapper_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is by the id of a function. Other code may replace a wrapper, so that nobody takes it out."""
    table, own = torch.jit._builtins._get_builtin_table(), torch.cumsum
    gc.collect()  # wrappers of earlier tests go now, and not in the middle
    before = set(table)
    monkeypatch.setattr(torch, "cumsum", own)  # and afterwards again
    for _ in range(2):
        xamp.register_half_function(torch, "cumsum")
        torch.cumsum = own
    registered._unregister_all()
    gc.collect()
    assert set(table) == before


def test_a_symbolic_trace_names_it() -> None:
    xamp.register_half_function(F, "softmax")
    traced = torch.fx.symbolic_trace(Scripted())
    assert "torch.nn.functional.softmax" in traced.code
    x = torch.randn(4, 4)
    assert torch.equal(traced(x), Scripted()(x))


# ---------------------------------------------------------------- torch.compile


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).requires_grad_(False)  # the test's operator has no derivative

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.inner(x).float()
        twice = torch.ops.xamp_test.twice
        return [F.softmax(hidden, -1), torch.cumsum(hidden, 0), torch.mm(hidden, hidden), twice(hidden)]


ACTIVE, INERT = [BF16, BF16, FP32, BF16], [FP32, FP32, BF16, FP32]


def register_four(operators: Any) -> None:
    xamp.register_half_function(F, "softmax")
    xamp.register_half_function(torch, "cumsum")
    xamp.register_float_function(torch, "mm")
    xamp.register_half_function(operators, "twice")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_it_acts_in_regions_only(compiler: str, operators: Any) -> None:
    register_four(operators)
    plain = Compiled()
    model = xamp.initialize(copy.deepcopy(plain), level="O4", verbosity=0, cast_model_outputs=False)
    x = torch.randn(4, 4)
    managed: Any = torch.compile(model, fullgraph=True, backend=compiler)
    foreign: Any = torch.compile(plain, fullgraph=True, backend=compiler)
    for _ in range(2):
        made = managed(x)
        assert [t.dtype for t in made] == ACTIVE
        assert all(torch.equal(a, b) for a, b in zip(made, model(x), strict=True))
        assert [t.dtype for t in foreign(x)] == [FP32] * 4
        with torch.autocast("cpu", dtype=BF16):
            assert [t.dtype for t in foreign(x)] == INERT
            assert [t.dtype for t in managed(x)] == ACTIVE
        with xamp.autocast(dtype=BF16):
            assert [t.dtype for t in foreign(x)] == ACTIVE


@pytest.mark.usefixtures("fresh_compiler")
def test_a_region_within_the_compiled_function_counts(operators: Any) -> None:
    register_four(operators)
    plain = Compiled()
    made_before = xamp.autocast(dtype=BF16)

    def inside(x: torch.Tensor) -> list[torch.Tensor]:
        with xamp.autocast(dtype=BF16):
            return plain(x)  # type: ignore[no-any-return]

    def outside(x: torch.Tensor) -> list[torch.Tensor]:
        with made_before:
            return plain(x)  # type: ignore[no-any-return]

    x = torch.randn(4, 4)
    for function in (inside, xamp.autocast(dtype=BF16)(plain)):
        assert [t.dtype for t in torch.compile(function, fullgraph=True, backend="eager")(x)] == ACTIVE
    with pytest.raises(Exception, match=r"autocast\(\): made outside of the function that torch\.compile traces"):
        torch.compile(outside, fullgraph=True, backend="eager")(x)
    for function in (outside, torch.compile(outside, backend="eager")):  # which ends its graph there
        assert [t.dtype for t in function(x)] == ACTIVE


@pytest.mark.usefixtures("fresh_compiler")
def test_what_is_compiled_before_it_is_registered_is_compiled_again() -> None:
    model = xamp.initialize(Calls(lambda x: torch.cumsum(x, 0)), level="O4", verbosity=0)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(torch.randn(4, 4))
    assert model.dtypes[-1] == FP32
    xamp.register_half_function(torch, "cumsum")
    compiled(torch.randn(4, 4))
    assert model.dtypes[-1] == BF16


@pytest.mark.parametrize("first", ["compile", "register"])
def test_it_does_not_matter_whether_the_compiler_was_there_first(first: str) -> None:
    """The compiler knows torch's functions by what stands under their names when it is first used."""
    script = f"""
import warnings; warnings.simplefilter("ignore")
import torch, torch.nn.functional as F, xamp
if {first!r} == "compile":
    torch.compile(lambda x: F.softmax(x, -1), backend="eager")(torch.ones(2))
xamp.register_half_function(F, "softmax")
class Model(torch.nn.Module):
    def forward(self, x):
        return F.softmax(x, -1)
model = xamp.initialize(Model(), level="O4", cast_model_outputs=False, verbosity=0)
print(torch.compile(model, fullgraph=True, backend="aot_eager")(torch.ones(2)).dtype)
"""
    executable = python() if first == "compile" else sys.executable  # the other has not even imported it
    done = subprocess.run([executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "torch.bfloat16\n"


# ---------------------------------------------------------------- disable_casts


def test_a_model_that_is_called_in_the_block_runs_without_casts() -> None:
    model = xamp.initialize(Calls(lambda x: x @ x), level="O4", verbosity=0)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=FP16):
        with xamp.disable_casts():
            model(x)
            with xamp.session(model).autocast():
                assert (x @ x).dtype == FP32
            assert (x @ x).dtype == FP16, "a foreign region around the block stays"
        assert (x @ x).dtype == FP16
    model(x)
    assert model.dtypes == [FP32, BF16]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_models_whose_parameters_are_cast_are_not_concerned(level: str) -> None:
    model = xamp.initialize(nn.Linear(2, 2), level=level, verbosity=0, cast_model_outputs=False)
    with xamp.disable_casts():
        assert model(ones()).dtype == {"O2": FP16, "O5": BF16}[level]


def test_registered_and_decorated_functions_rest_in_the_block() -> None:
    xamp.register_half_function(torch, "cumsum")
    half: Any = xamp.half_function(lambda x: x)
    with xamp.autocast(dtype=BF16):
        with xamp.disable_casts():
            assert torch.cumsum(ones(), 0).dtype == FP32
            assert half(ones()).dtype == FP32
        assert torch.cumsum(ones(), 0).dtype == BF16


def test_the_block_is_one_threads() -> None:
    seen = []

    def work() -> None:
        with xamp.autocast():
            seen.append((ones() @ ones()).dtype)

    with xamp.disable_casts():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert seen == [FP16]


def test_a_function_is_decorated_to_run_without_casts() -> None:
    @xamp.disable_casts()
    def product(depth: int = 2) -> list[torch.dtype]:
        return [(ones() @ ones()).dtype, *(product(depth - 1) if depth else [])]

    with xamp.autocast():
        assert product() == [FP32] * 3
        assert (ones() @ ones()).dtype == FP16


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_block_is_compiled(compiler: str) -> None:
    @xamp.disable_casts()
    def uncast(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            with xamp.disable_casts():
                inside = x @ x
            return [inside, uncast(x), x @ x]

    model = xamp.initialize(Model(), level="O4", verbosity=0, cast_model_outputs=False)
    compiled: Any = torch.compile(model, fullgraph=True, backend=compiler)
    for _ in range(2):
        assert [t.dtype for t in compiled(ones())] == [FP32, FP32, BF16]
        with xamp.disable_casts():
            assert [t.dtype for t in compiled(ones())] == [FP32] * 3
