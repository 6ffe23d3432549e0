"""torch.compile under Apex's casts: the dtypes of eager, whenever it was compiled, and no stale cast.

Covers: xamp.apex._patches, xamp.apex._casts_handle.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import compiling
import pytest
import torch
import torch.compiler.config
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, casts, stop
from forked_python import python
from torch import nn

from xamp.apex import _patches
from xamp.apex._casts_handle import disable_casts
from xamp.apex._handle import init
from xamp.casting import active

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # inductor imports what uses it

NO_COMPILER = shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler")

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
linear, convolution, cell = nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.LSTMCell(4, 4)
attention, encoder = nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

PROBES: dict[str, Callable[[torch.Tensor], Any]] = {
    "module": linear,
    "convolution": lambda x: convolution(x[None]),
    "cell": lambda x: cell(x)[0],
    "attention": lambda x: attention(x[None], x[None], x[None])[0],
    "encoder": lambda x: encoder(x[None]),
    "function": lambda x: torch.mm(x, x),
    "method": lambda x: x.mm(x),
    "operator": lambda x: x @ x,
    "power": lambda x: x.half() ** 2,
    "lifted": lambda x: F.softmax(x.half(), dim=0),
    "lifted method": lambda x: x.half().sum(),
    "to the CPU": lambda x: x.half().cpu(),
    "promoted": lambda x: x.half() + x,
    "sequence": lambda x: torch.cat([x, x.half()]),
    "in place": lambda x: x.half().add_(x),
    "unlisted": lambda x: F.batch_norm(x.half(), None, None, training=True),
}


@pytest.fixture(autouse=True)
def _fresh_compiler(inductor_cache: None) -> Iterator[None]:
    compiling.forget()
    yield
    stop()
    assert not _patches.is_installed()
    compiling.forget()


def compiled(function: Any, compiler: str) -> Any:
    return torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)


CASES: list[Any] = [pytest.param(name, compiler) for name in PROBES for compiler in ("eager", "aot_eager")]
CASES += [pytest.param(name, "inductor", marks=[pytest.mark.slow, needs_compiler]) for name in ("module", "method")]


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("name", "compiler"), CASES)
def test_compiled_before_during_and_after(name: str, compiler: str) -> None:
    """A method of Tensor in compiled code is guarded by nothing: it kept the casts of when it was compiled."""
    plain, made = PROBES[name], compiled(PROBES[name], compiler)
    with torch.no_grad():
        assert made(square).dtype is plain(square).dtype
        outside = plain(square).dtype
        with casts():
            during = plain(square).dtype
            assert made(square).dtype is during
            with disable_casts():
                assert made(square).dtype is plain(square).dtype is outside
            assert made(square).dtype is during
            init(patch_type=BF16)
            assert made(square).dtype is plain(square).dtype
            newest = compiled(lambda x: plain(x), compiler)
            assert newest(square).dtype is plain(square).dtype
        assert made(square).dtype is newest(square).dtype is outside


def test_first_compiled_in_a_disabled_block() -> None:
    made = compiled(lambda x: x.mm(x), "aot_eager")
    with casts():
        with disable_casts():
            assert made(square).dtype is FP32
        assert made(square).dtype is FP16


def test_disabled_blocks_that_overlap() -> None:
    """The one that began last ends last: what was compiled for it is for nothing else."""
    made = compiled(lambda x: x.mm(x), "aot_eager")
    with casts() as handle:
        outer, inner = handle._disable_casts(), disable_casts()
        with contextlib.ExitStack() as stack:
            outer.__enter__()
            stack.enter_context(inner)
            assert made(square).dtype is FP32
            outer.__exit__(None, None, None)
            assert made(square).dtype is FP32
        assert made(square).dtype is FP16
        with disable_casts():
            assert made(square).dtype is FP32


def test_a_disabled_block_that_ends_on_another_thread() -> None:
    """The thread it began on is as before once a block has ended there."""
    with casts():
        block = disable_casts()
        block.__enter__()
        other = threading.Thread(target=block.__exit__, args=(None, None, None))
        other.start()
        other.join()
        with disable_casts():
            assert (square @ square).dtype is FP32
        assert (square @ square).dtype is FP16
        assert active.snapshot() == (None, None)


def test_training_gets_the_gradients_of_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1), nn.Linear(4, 4))
    made = compiled(model, "aot_eager")
    found = []
    with casts() as handle:
        for run in (model, made):
            model.zero_grad()
            for _ in range(2):
                run(square).float().pow(2).sum().backward()
                handle._clear_cache()
            found.append([p.grad for p in model.parameters()])
    for eager, after in zip(*found, strict=True):
        torch.testing.assert_close(after, eager, rtol=1e-3, atol=1e-4)


def test_what_is_compiled_never_meets_the_cache() -> None:
    """A cast that eager cached is of the weight as it was; one made while tracing is no tensor at all."""
    made = compiled(linear, "aot_eager")
    with casts() as handle, torch.no_grad():
        made(square)
        assert not handle.cache
        linear(square)
        before = linear.weight.detach().clone()
        try:
            linear.weight.data.zero_()
            assert torch.equal(made(square).float(), linear.bias.half().float().expand(4, 4))
        finally:
            linear.weight.data.copy_(before)


def test_a_block_without_casts_in_compiled_code() -> None:
    """It is no part of a graph: methods in a graph would not know that they are in it."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with disable_casts():
            inside = x.mm(x)
        return inside, x.mm(x)

    with casts():
        assert [y.dtype for y in torch.compile(both, backend="aot_eager")(square)] == [FP32, FP16]
        compiling.forget()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(both, "aot_eager")(square)


def test_the_error_of_an_in_place_function_is_raised() -> None:
    made = torch.compile(lambda x: x.half().exp_(), backend="aot_eager")
    assert made(square).dtype is FP16
    with casts(), pytest.raises(NotImplementedError, match="Cannot call in-place method exp_ on fp16"):
        made(square)
    assert made(square).dtype is FP16


def test_export_holds_the_casts() -> None:
    with casts():
        program = torch.export.export(nn.Sequential(nn.Linear(4, 4)), (square,))
    assert program.module()(square).dtype is FP16


def test_the_compiler_learns_torchs_functions_before_they_are_replaced() -> None:
    """It looks its table up once, by name: first under casts, nn.Conv1d could not be compiled for the process' life."""
    code = """
        import torch
        from xamp.apex._handle import init
        handle = init()
        model, x = torch.nn.Conv1d(2, 2, 1), torch.ones(1, 2, 3)
        made = torch.compile(model, backend="eager", fullgraph=True)
        assert made(x).dtype is torch.float16
        handle._deactivate()
        assert made(x).dtype is torch.float32
        assert torch.compile(lambda x: x.mm(x), backend="eager", fullgraph=True)(x[0, :, :2]).dtype is torch.float32
    """
    slow = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"  # of the compiler of torch 2.15
    subprocess.run([sys.executable, "-W", "error", "-W", slow, "-c", textwrap.dedent(code)], check=True)


def test_the_keys_of_caches_on_disk_change_and_are_put_back() -> None:
    config: Any = torch.compiler.config
    before, found = config.cache_key_tag, set()
    for lower in (FP16, BF16):
        with casts(lower):
            found.add(config.cache_key_tag)
            init(patch_type=lower, cast_all_floats=True)
            found.add(config.cache_key_tag)
    assert config.cache_key_tag == before
    assert len(found) == 4
    assert before not in found


@pytest.mark.parametrize("own", ["", "mine"])
def test_the_keys_of_caches_on_disk_tell_of_a_pause(own: str) -> None:
    """Casts are paused for all threads, and the slot tells only the one that paused them.

    In a thread of its own, for torch keeps its settings by thread, and what was set once cannot be unset.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(keys_of_a_pause, own).result()


def keys_of_a_pause(own: str) -> None:
    config: Any = torch.compiler.config
    if own:  # in place of what the environment says
        config.cache_key_tag = config.cache_key_tag + own
    before = config.cache_key_tag
    with casts():
        handle: Any = init()
        on = config.cache_key_tag
        with disable_casts():
            paused = config.cache_key_tag
            with disable_casts():
                assert config.cache_key_tag == paused
            assert config.cache_key_tag == paused
        assert paused != on
        assert config.cache_key_tag == on
        handle._is_active = False
        assert config.cache_key_tag == paused
        newer, two = init(), config.cache_key_tag
        assert not two.endswith("-paused")
        newer._deactivate()
        assert config.cache_key_tag == paused
        handle._is_active = True
        assert config.cache_key_tag == on
        handle._deactivate()
    assert config.cache_key_tag == before


def test_the_keys_of_caches_on_disk_change_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for version in ("0.2.0", "0.2.1"):
        monkeypatch.setattr(_patches, "__version__", version)
        with casts():
            found.add(torch.compiler.config.cache_key_tag)
    assert len(found) == 2


def test_the_keys_are_those_of_every_thread() -> None:
    """torch keeps its settings by thread. In one of its own: a test before may have set one in this."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(keys_of_every_thread).result()


def keys_of_every_thread() -> None:
    config: Any = torch.compiler.config
    found: list[str] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: found.append(config.cache_key_tag))
        thread.start()
        thread.join()

    ask()
    with casts(), disable_casts():
        ask()
        assert found[1] == config.cache_key_tag
    ask()
    assert found[0] == found[2] != found[1]
    assert found[1].endswith("-paused")


@pytest.mark.slow
@needs_compiler
def test_caches_on_disk_know_of_casts() -> None:
    """What was compiled without casts was found again under them: the same call, and fp32 came out."""
    code = """
        import sys, torch
        from xamp.apex._handle import init
        torch._dynamo.config.suppress_errors = False
        if sys.argv[1] == "casts":
            init()
        made = torch.compile(lambda x: x.mm(x), fullgraph=True)
        print(made(torch.ones(4, 4)).dtype)
    """
    for which, wanted in (("plain", "torch.float32"), ("casts", "torch.float16"), ("plain", "torch.float32")):
        command = [python(), "-c", textwrap.dedent(code), which]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == wanted
