"""Functions are replaced where they stand, without trace once nobody wants it; and what remembers them is told.

Covers: xamp.apex._patches, xamp.apex._casts.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, attributes, casts, stop
from forked_python import python
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from xamp.apex import _patches
from xamp.apex._functions import register_float_function, register_half_function
from xamp.apex._handle import init

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _no_casts_are_left() -> Iterator[None]:
    yield
    stop()
    assert not _patches.is_installed()


def changed(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> set[str]:
    """Names that were added, taken away or given another object."""
    keys = before.keys() | after.keys()
    return {name for owner, name in keys if before.get((owner, name), keys) is not after.get((owner, name), keys)}


def test_nothing_is_left_behind() -> None:
    _patches._prepare_compiler()  # imports modules
    before = attributes()
    handle = init()
    during = attributes()
    handle._deactivate()
    assert changed(before, attributes()) == set()
    assert len(changed(before, during)) > 150
    assert {"lstm", "gru_cell", "check_input", "__add__", "softmax", "mm"} <= changed(before, during)
    handle._deactivate()
    assert changed(before, attributes()) == set()


def test_inherited_methods_are_inherited_again() -> None:
    """apex.amp put back 100 methods of Tensor as attributes of their own, which subclasses and slots then saw."""
    assert "mm" not in vars(torch.Tensor)
    with casts():
        assert "mm" in vars(torch.Tensor)
    assert "mm" not in vars(torch.Tensor)
    assert "lstm" not in vars(torch._VF)


def test_functions_that_were_kept_are_plain_again() -> None:
    with casts():
        mm, softmax, add, exp_ = torch.mm, F.softmax, torch.Tensor.__add__, torch.Tensor.exp_
        assert mm(square, square).dtype is FP16
    assert mm(square, square).dtype is FP32
    assert softmax(square.half(), 0).dtype is FP16
    assert add(square.half(), square.half()).dtype is FP16
    assert exp_(square.half()).dtype is FP16


@pytest.mark.parametrize("first", [0, 1])
def test_handles_may_end_in_any_order(first: int) -> None:
    """Wrappers around wrappers: ended in the order of their beginning, apex.amp's casts stayed for good."""
    handles = [init(), init(patch_type=BF16)]
    assert torch.mm(square, square).dtype is BF16
    handles[first]._deactivate()
    assert torch.mm(square, square).dtype is (BF16, FP16)[first]
    handles[1 - first]._deactivate()
    assert torch.mm(square, square).dtype is FP32
    assert not _patches.is_installed()


def test_nothing_is_wrapped_twice() -> None:
    names: Any = torch
    original = names.mm
    with casts():
        wrapper = names.mm
        init()
        assert names.mm is wrapper
        assert wrapper.__wrapped__ is original


def test_what_somebody_else_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*args: Any) -> str:
        return "mine"

    names: Any = torch
    handle = init()
    monkeypatch.setattr(torch, "mv", mine)
    handle._deactivate()
    assert names.mv is mine
    monkeypatch.undo()  # puts the wrapper back
    kept: Any = vars(torch)["mv"]
    names.mv = kept.__wrapped__
    assert kept(square, square[0]).dtype is FP32


def test_a_registration_that_cannot_be_installed_changes_nothing() -> None:
    before = attributes()
    register_half_function(int, "bit_length")
    with pytest.raises(TypeError, match="immutable type"):
        init()
    assert changed(before, attributes()) == set()
    assert not _patches.is_installed()


# ---------------------------------------------------------------- what remembers


def test_overridable_functions_are_torchs_again() -> None:
    """torch.overrides looks functions up once: first asked under casts, it kept 69 wrappers for good."""
    with casts():
        wrappers: set[Any] = {torch.mm, torch.Tensor.mm, F.softmax}
        assert torch.mm in torch.overrides.get_testing_overrides()
        torch.overrides.get_overridable_functions()
    found = {function for functions in torch.overrides.get_overridable_functions().values() for function in functions}
    assert not wrappers & (found | torch.overrides.get_testing_overrides().keys())
    assert {torch.mm, F.softmax} <= found


class Holder(nn.Module):
    """Keeps functions of torch's, as TransformerEncoderLayer keeps its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.activations = [F.gelu, F.softmax, torch.exp, torch.Tensor.mm]


def test_functions_kept_in_a_module_are_pickled() -> None:
    with casts():
        model = Holder()
        text = pickle.dumps(model)
        loaded = pickle.loads(text)
        assert all(a is b for a, b in zip(loaded.activations, model.activations, strict=True))
        buffer = io.BytesIO()
        torch.save(nn.TransformerEncoderLayer(4, 2, activation=F.gelu), buffer)
        assert copy.deepcopy(model).activations == model.activations
    assert pickle.loads(text).activations == [F.gelu, F.softmax, torch.exp, torch.Tensor.mm]


def scripted(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(torch.mm(x, x), dim=0) + x.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(x)
        return output  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_script_compiles_the_functions_themselves() -> None:
    with casts():
        made = torch.jit.script(scripted)
        recurrent = torch.jit.script(Recurrent())
    assert made(square).dtype is FP32
    assert torch.equal(made(square), scripted(square))
    assert recurrent(square).dtype is FP32


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_trace_holds_its_own_casts() -> None:
    """And not a cast that was cached before it, or one that it leaves in the cache."""
    linear = nn.Linear(4, 4)
    with casts():
        linear(square)
        traced = torch.jit.trace(linear, square)
        linear(square).float().sum().backward()
    with torch.no_grad():
        linear.weight.zero_()
    assert traced(square).dtype is FP16
    assert torch.equal(traced(square).float(), linear.bias.half().float().expand(4, 4))


def test_transformations_leave_nothing_in_the_cache() -> None:
    linear = nn.Linear(4, 4)
    with casts() as handle:
        gradient = torch.func.grad(lambda x: linear(x).float().sum())(square)
        mapped = torch.vmap(linear)(square)
        assert not handle.cache
        assert linear(square).dtype is FP16
    assert gradient.dtype is FP32
    assert mapped.dtype is FP16


def test_a_process_that_forgets_to_end_its_casts_ends() -> None:
    code = """
        import torch
        from xamp.apex._handle import init
        handle = init()
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_where_there_is_cuda_nothing_warns_and_inductor_comes_only_after_a_compilation(compiled: bool) -> None:
    """There a reset of the compiler imports all of inductor, and with it what torch itself calls deprecated."""
    code = f"""
        import sys, torch, torch._dynamo
        from xamp.apex._handle import init
        if {compiled}:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.cuda.is_available = lambda: True
        init()
        assert {compiled} or "torch._inductor.cudagraph_trees" not in sys.modules
    """
    subprocess.run([python(), "-W", "error", "-c", textwrap.dedent(code)], check=True)


def test_a_user_may_change_the_lists() -> None:
    from xamp.apex._lists import TENSOR

    TENSOR.FP32_FUNCS.remove("cpu")
    try:
        with casts():
            assert square.half().cpu().dtype is FP16
    finally:
        TENSOR.FP32_FUNCS.insert(3, "cpu")


def test_a_registered_function_of_a_subclass_is_put_back() -> None:
    class Plain(nn.Module):
        @staticmethod
        def product(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @classmethod
        def again(cls, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Derived(Plain):
        pass

    before = dict(vars(Plain)), dict(vars(Derived))
    register_half_function(Plain, "product")
    register_float_function(Derived, "again")
    with casts():
        assert Plain.product(square).dtype is FP16
        assert Plain().product(square).dtype is FP16
        assert Derived.again(square.half()).dtype is FP32
        assert Plain.again(square.half()).dtype is FP16
    assert (dict(vars(Plain)), dict(vars(Derived))) == before


def test_a_registered_class_method_of_a_builtin_is_put_back() -> None:
    class Table(dict[str, torch.Tensor]):
        pass

    register_half_function(Table, "fromkeys")
    with casts():
        assert Table.fromkeys("a", square)["a"].dtype is FP16
        assert type(Table().fromkeys("a", square)) is Table
    assert Table.fromkeys("a", square)["a"].dtype is FP32
    assert "fromkeys" not in vars(Table)


def test_a_graph_of_operators_casts_the_weights_that_it_holds() -> None:
    """And not a cast that was in the cache."""
    linear = nn.Linear(4, 4)
    with casts():
        linear(square)
        graph = make_fx(linear)(square)
        assert linear(square).dtype is FP16
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(graph(square).float(), linear.bias.half().float().expand(4, 4))


class Reticent(torch.Tensor):
    """Answers for one function and tells nothing else, not even its dtype."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is getattr(F.layer_norm, "__wrapped__", F.layer_norm):
            return "answered"
        raise ValueError(f"{func} is not for this")


def test_a_subclass_that_does_not_tell_its_dtype_is_called_as_without_casts() -> None:
    told = square.as_subclass(Reticent)
    with casts():
        wrapped = F.layer_norm
        with pytest.raises(ValueError, match="is not for this"):
            wrapped(told, (4,))
    assert wrapped is not F.layer_norm
    assert wrapped(told, (4,)) == "answered"
