"""torch.compile under the portable op policy where it is no single graph: recomputed, shared, broken, cached.

Covers: xamp.casting.ops.portable, xamp.casting.active, xamp.casting.recompute, xamp.torch_compat.cache_keys.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiling
import pytest
import torch
import torch.compiler.config
import torch.nn.functional as F
from table_ops import BF16, CHECKPOINTING, FP32, assert_equal, batch, checkpointing, gradients, many, start
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting import registered
from xamp.casting.ops import portable

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated"),  # inductor imports what uses it
]

NO_COMPILER = shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None
_leaves: Callable[[Any], list[torch.Tensor]] = torch.utils._pytree.tree_leaves
graph_break: Callable[[], None] = torch._dynamo.graph_break
CONFIG: Any = torch.compiler.config
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler")
COMPILERS = ["eager", "aot_eager"]
each_compiler = pytest.mark.parametrize("compiler", COMPILERS)
each_kind = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])


def autocast() -> Any:
    return torch.autocast("cpu", dtype=BF16)


# ---------------------------------------------------------------- compiled, and recomputed in backward


class Checkpointed(nn.Module):
    """Runs a function, perhaps a compiled one, in a checkpoint."""

    def __init__(self, run: Callable[..., Any], block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.run, self.block, self.reentrant = run, block, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


def trained(run: Callable[..., Any], block: nn.Module, reentrant: bool, op_policy: str) -> list[torch.Tensor]:
    block.zero_grad()
    model, x = start(Checkpointed(run, block, reentrant), op_policy=op_policy), batch()
    model(x).square().mean().backward()
    return gradients(block, x)


@pytest.mark.drawn(8)
@each_kind
@pytest.mark.parametrize(
    ("before", "compiler"),
    [
        *itertools.product(["nobody", "foreign", "outside", "native", "portable"], COMPILERS),
        pytest.param("foreign", "inductor", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_a_compiled_block_is_recomputed_as_it_ran_whoever_had_it_compiled(
    before: str, compiler: str, reentrant: bool
) -> None:
    block = many(noting=False)
    run: Any = torch.compile(block.body, backend=compiler)
    if before in ("foreign", "outside"):
        with autocast() if before == "foreign" else contextlib.nullcontext():
            loss = run(batch()).float().square().mean()
        loss.backward()
    elif before != "nobody":
        trained(run, block, reentrant, before)
    found = {policy: trained(run, block, reentrant, policy) for policy in ("portable", "native")}
    for policy, mine in found.items():
        other = many(noting=False)
        # of the same compiler, whose sums may be in another order than eager's
        wanted = trained(torch.compile(other.body, backend=compiler), other, reentrant, policy)
        assert_equal(mine, wanted)
    assert not all(map(torch.equal, *found.values()))


@each_kind
@each_compiler
@pytest.mark.parametrize("op_policy", ["portable", "native"])
def test_another_librarys_checkpointing_of_a_block_of_ones_own(
    op_policy: str, compiler: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for whose in CHECKPOINTING:
        compiling.forget()
        checkpointing(whose, monkeypatch)
        block = many(noting=False)
        found.append(trained(torch.compile(block.body, backend=compiler), block, reentrant, op_policy))
    assert_equal(*found)


@each_kind
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "backward"])
def test_nothing_is_compiled_in_backward_but_for_what_torch_compiles_there(reentrant: bool, scaled: bool) -> None:
    made = {}
    for policy in ("portable", "native"):
        compiling.forget()
        counters.clear()
        block = many(noting=False)
        model = Checkpointed(torch.compile(block.body, backend="aot_eager"), block, reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, level="O4", op_policy=policy, backend="cpu", loss_scale=4.0, verbosity=0)
        loss = model(batch()).square().mean()
        graphs = [counters["stats"]["unique_graphs"]]
        if scaled:
            with xamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        made[policy] = [*graphs, counters["stats"]["unique_graphs"]]
    # A reentrant checkpoint runs forward without grad mode, and so by another graph.
    assert made["portable"] == made["native"] == ([1, 2] if reentrant else [1, 1])


@each_kind
@each_compiler
def test_registered_functions_too(compiler: str, reentrant: bool) -> None:
    seen = []

    def body(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 3.0, -1).float().square().cumsum(0)

    xamp.register_half_function(F, "softmax")
    try:
        for by_others in (True, False):
            compiling.forget()
            run: Any = torch.compile(body, backend=compiler)
            if by_others:
                with autocast():
                    run(batch()).sum().backward()
            x = batch()
            start(Checkpointed(run, nn.Linear(1, 1), reentrant), op_policy="native")(x).sum().backward()
            seen.append(x.grad)
    finally:
        registered._unregister_all()
    assert_equal(seen[:1], seen[1:])


@each_kind
def test_a_foreign_block_is_recomputed_as_it_ran_also_within_a_region(reentrant: bool) -> None:
    """Its backward is called in a region of xamp's, which it has nothing to do with."""
    start(nn.Linear(1, 1))
    block, x = many(), batch()
    with autocast():
        loss = checkpoint(block.body, x * 1.0, use_reentrant=reentrant).float().sum()
    with xamp.autocast(dtype=BF16):
        loss.backward()
        assert F.softmax(x.to(BF16), -1).dtype == FP32  # the region is what it was
    assert block.dtypes["softmax"] == [BF16, BF16]
    assert gradients(block, x)


def test_a_checkpoint_without_gradients_and_its_errors_are_torchs() -> None:
    start(nn.Linear(1, 1))
    with torch.no_grad():
        assert checkpoint(torch.exp, torch.ones(2), use_reentrant=False).dtype == FP32
    with pytest.raises(KeyError):
        checkpoint({}.__getitem__, "absent", use_reentrant=False)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: missing"):
        checkpoint(torch.exp, torch.ones(2), use_reentrant=True, missing=1)
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        checkpoint(torch.exp, torch.ones(2), use_reentrant=False, determinism_check="perhaps")


# ---------------------------------------------------------------- broken graphs, and code that is given up


def look(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.softmax(x.to(BF16), -1), torch.mv(x, x[0, :8])


def broken(x: torch.Tensor) -> Any:
    before = look(x)
    graph_break()
    return *before, *look(x)


def in_a_block(x: torch.Tensor) -> Any:
    with xamp.autocast(dtype=BF16):
        inside = broken(x)
    return *inside, *look(x)


def in_nested_blocks(x: torch.Tensor) -> Any:
    with xamp.autocast(dtype=BF16):
        with xamp.disable_casts():
            inner = broken(x)
        return *inner, *broken(x)


@xamp.autocast(dtype=BF16)
def decorated(x: torch.Tensor) -> Any:
    return broken(x)


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return broken(x)


class Loop(nn.Module):
    """The compiler gives up on a break in a loop, and compiles what is called in there."""

    def forward(self, x: torch.Tensor) -> Any:
        made: list[torch.Tensor] = []
        for _ in range(2):
            graph_break()
            made += look(x)
        return made


MADE_BEFORE = xamp.autocast(dtype=BF16)


def made_before(x: torch.Tensor) -> Any:
    with MADE_BEFORE:
        inside = look(x)
    return *inside, *look(x)


RUNS: dict[str, Callable[[], Any]] = {
    "block": lambda: in_a_block,
    "nested blocks": lambda: in_nested_blocks,
    "decorator": lambda: decorated,
    "made before": lambda: made_before,
    "model": lambda: start(Model(), cast_model_outputs=False),
    "native model": lambda: start(Model(), op_policy="native", cast_model_outputs=False),
    "loop": lambda: start(Loop(), cast_model_outputs=False),
    "lstm": lambda: start(nn.LSTM(8, 8), cast_model_outputs=False),
    "gru": lambda: start(nn.GRU(8, 8), cast_model_outputs=False),
    "gru cell": lambda: start(nn.GRUCell(8, 8), cast_model_outputs=False),
    "layer in a model": lambda: start(nn.Sequential(nn.Softmax(-1), nn.LSTM(8, 8)), cast_model_outputs=False),
}


@pytest.mark.drawn(8)
@each_compiler
@pytest.mark.parametrize("name", RUNS)
def test_dtypes_are_those_of_eager_where_the_graph_breaks(name: str, compiler: str) -> None:
    run, x = RUNS[name](), batch().detach()
    compiled: Any = torch.compile(run, backend=compiler)
    for around in (contextlib.nullcontext, autocast, contextlib.nullcontext):
        with around():
            eager = _leaves(run(x))
            made = _leaves(compiled(x))
        for a, b in zip(made, eager, strict=True):
            assert a.dtype == b.dtype
            assert (a - b).float().norm() <= 1e-2 * b.float().norm()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@each_compiler
@each_kind
@pytest.mark.parametrize("inner", [True, False], ids=["break inside", "break outside"])
def test_a_checkpoint_in_a_broken_graph(inner: bool, reentrant: bool, compiler: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = many(noting=False)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            if inner:
                graph_break()
            return self.block.body(x)

        def forward(self, x: torch.Tensor) -> Any:
            x = x * 1.0
            graph_break()
            return checkpoint(self.body, x, use_reentrant=reentrant) * 1.0

    found = []
    for compiles in (True, False):
        model, x = start(Net()), batch()
        run: Any = torch.compile(model, backend=compiler) if compiles else model
        run(x).square().mean().backward()
        found.append(gradients(model, x))
    assert_equal(*found)


@each_compiler
@each_kind
def test_a_checkpoint_within_one_graph(reentrant: bool, compiler: str) -> None:
    found = []
    for compiles in (True, False):
        block = many(noting=False)
        model, x = start(Checkpointed(block.body, block, reentrant)), batch()
        run: Any = torch.compile(model, backend=compiler, fullgraph=True) if compiles else model
        run(x).square().mean().backward()
        found.append(gradients(model, x))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


# ---------------------------------------------------------------- the compiler's caches on disk


@needs_compiler
@pytest.mark.slow
def test_what_is_cached_on_disk_is_cached_for_this_table(tmp_path: Path) -> None:
    """The key of a graph that is compiled in a region holds the operators that are called, and not their casts."""
    session = xamp.session(start(nn.Linear(1, 1)))
    x = batch().detach()
    tag = CONFIG.cache_key_tag

    def compiled(region: Any, tag: str) -> tuple[torch.dtype, bool]:
        compiling.forget()
        counters.clear()
        config = CONFIG.patch(cache_key_tag=tag)
        caching = torch._functorch.config.patch(enable_autograd_cache=True)
        with compiling.files_in(tmp_path), caching, config, region:
            made = torch.compile(look)(x)
        counted = counters["aot_autograd"]
        assert counted["autograd_cache_hit"] + counted["autograd_cache_miss"] == 1
        return made[0].dtype, bool(counted["autograd_cache_hit"])

    assert compiled(session.autocast(), tag) == (FP32, False)
    assert compiled(session.autocast(), tag) == (FP32, True)
    assert compiled(autocast(), tag) == (BF16, False)  # and another policy's is not taken
    assert compiled(session.autocast(), "") == (FP32, False)  # another table's neither


def test_the_tag_of_the_caches_tells_tables_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    start(nn.Linear(1, 1))
    assert CONFIG.cache_key_tag.count(";xamp-cpu-") == 1
    tags = []
    for missing in ({"exp": None}, {"exp": None, "mv": None}, {"exp": "lower"}, {"exp": None}):
        with CONFIG.patch(cache_key_tag="mine"):
            portable._tag_caches("cpu", missing)
            tags.append(CONFIG.cache_key_tag)
    assert all(tag.startswith("mine;xamp-cpu-") for tag in tags)
    assert (tags[0], len(set(tags))) == (tags[3], 3)
