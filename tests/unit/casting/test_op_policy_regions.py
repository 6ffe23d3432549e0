"""Regions of the portable policy, of the native one, and of others within one another: which rules hold where.

Covers: xamp.casting.active, xamp.casting.autocast, xamp.casting.functions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table_ops import BF16, FP16, FP32, start
from table_ops import region as make_region
from torch import nn

import xamp

Dtypes = tuple[torch.dtype, torch.dtype]

# Of softmax of a bf16 tensor, and of a product of fp32 ones that only the portable table has.
PORTABLE = {BF16: (FP32, BF16), FP16: (FP32, FP16)}
NATIVE = OFF = (BF16, FP32)  # a CPU's own list has neither


@pytest.fixture(autouse=True)
def _all_are_left() -> Iterator[None]:
    yield
    assert look() == OFF  # whatever a test entered was left


def look() -> Dtypes:
    x = torch.ones(3, 3)
    return F.softmax(x.to(BF16), -1).dtype, torch.mv(x, x[0]).dtype


def portable() -> Any:
    return make_region("O4")


def native() -> Any:
    return make_region("O4", "native")


def foreign(dtype: torch.dtype = BF16, enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


Block = tuple[Callable[[], Any], Dtypes]

# From the outermost block inwards: what it is, and what holds in it.
NESTED: dict[str, list[Block]] = {
    "xamp.autocast changes the dtype": [(portable, PORTABLE[BF16]), (xamp.autocast, PORTABLE[FP16])],
    "xamp.autocast in itself": [
        (xamp.autocast, PORTABLE[FP16]),
        (lambda: xamp.autocast(dtype=BF16), PORTABLE[BF16]),
        (xamp.autocast, PORTABLE[FP16]),
    ],
    "xamp.autocast in a native region": [(native, NATIVE), (xamp.autocast, PORTABLE[FP16])],
    "xamp.autocast in torch's": [(foreign, NATIVE), (lambda: xamp.autocast(dtype=BF16), PORTABLE[BF16])],
    "a native region in xamp.autocast": [(xamp.autocast, PORTABLE[FP16]), (native, NATIVE)],
    "a native region in a portable one": [(portable, PORTABLE[BF16]), (native, NATIVE), (portable, PORTABLE[BF16])],
    "switched off": [(portable, PORTABLE[BF16]), (lambda: xamp.autocast(enabled=False), OFF)],
    "switched off, and torch's in there": [
        (portable, PORTABLE[BF16]),
        (lambda: xamp.autocast(enabled=False), OFF),
        (foreign, NATIVE),
    ],
    "switched off, and on again": [
        (portable, PORTABLE[BF16]),
        (lambda: xamp.autocast(enabled=False), OFF),
        (lambda: xamp.autocast(dtype=BF16), PORTABLE[BF16]),
    ],
    # A torch.autocast in a region does what it does in one of torch's: the rules stay, dtype and switch are its own.
    "torch's changes the dtype": [(portable, PORTABLE[BF16]), (lambda: foreign(FP16), PORTABLE[FP16])],
    "torch's switches off": [(portable, PORTABLE[BF16]), (lambda: foreign(enabled=False), OFF)],
    "torch's switches off, and on again": [
        (portable, PORTABLE[BF16]),
        (lambda: foreign(enabled=False), OFF),
        (lambda: foreign(FP16), PORTABLE[FP16]),
    ],
    "torch's switches off, and xamp.autocast on again": [
        (portable, PORTABLE[BF16]),
        (lambda: foreign(enabled=False), OFF),
        (xamp.autocast, PORTABLE[FP16]),
        (lambda: foreign(BF16), PORTABLE[BF16]),
    ],
    "torch's in a native region": [(native, NATIVE), (lambda: foreign(enabled=False), OFF), (foreign, NATIVE)],
    "torch's of another device": [
        (portable, PORTABLE[BF16]),
        (lambda: torch.autocast("xpu", enabled=False), PORTABLE[BF16]),
    ],
    "casts disabled": [
        (portable, PORTABLE[BF16]),
        (xamp.disable_casts, OFF),
        (portable, OFF),
        (xamp.autocast, OFF),
        (native, OFF),
    ],
    "casts disabled, and torch's in there": [(portable, PORTABLE[BF16]), (xamp.disable_casts, OFF), (foreign, NATIVE)],
}


@pytest.mark.parametrize("blocks", NESTED.values(), ids=NESTED)
def test_which_rules_hold(blocks: list[Block]) -> None:
    inwards, outwards = [], []

    def descend(rest: list[Block]) -> None:
        if rest:
            with rest[0][0]():
                inwards.append(look())
                descend(rest[1:])
                outwards.append(look())

    descend(blocks)
    assert inwards == [wanted for _, wanted in blocks]
    assert outwards == inwards[::-1]


@pytest.mark.parametrize("blocks", NESTED.values(), ids=NESTED)
def test_an_error_leaves_all_of_them(blocks: list[Block]) -> None:
    def fail() -> None:
        with contextlib.ExitStack() as stack:
            for make, _ in blocks:
                stack.enter_context(make())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert look() == OFF
    with foreign():
        assert look() == NATIVE


class Nested(nn.Module):
    """Looks, runs what it holds within a block, and looks again."""

    def __init__(self, block: Callable[[], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.inner = block, inner

    def forward(self) -> list[Dtypes]:
        before = look()
        with self.block():
            within = look() if self.inner is None else self.inner()
        return [before, within, look()]


@pytest.mark.parametrize("blocks", [b for b in NESTED.values() if b[0][0] in (portable, native)])
def test_a_model_is_a_region_too(blocks: list[Block]) -> None:
    (first, outer), (block, inner) = blocks[:2]
    model = start(Nested(block), op_policy="portable" if first is portable else "native")
    for around in (contextlib.nullcontext, portable, native, foreign, xamp.autocast):
        with around():
            assert model() == [outer, inner, outer]


@pytest.mark.parametrize("outer", ["portable", "native"])
def test_models_within_models_keep_their_own(outer: str) -> None:
    wanted = {"portable": PORTABLE[FP16], "native": NATIVE}
    other = "native" if outer == "portable" else "portable"
    inner = start(Nested(contextlib.nullcontext), "O4" if other == "native" else "O1", other)
    model = start(Nested(contextlib.nullcontext, inner), "O1" if outer == "portable" else "O4", outer)
    assert model() == [wanted[outer], [wanted[other]] * 3, wanted[outer]]


def test_a_region_holds_for_its_own_thread() -> None:
    found: list[Dtypes] = []

    def other() -> None:
        found.append(look())
        with foreign():
            found.append(look())

    with portable():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert look() == PORTABLE[BF16]
    assert found == [OFF, NATIVE]
