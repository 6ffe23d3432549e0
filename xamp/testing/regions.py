"""Tier levels, second part: a region casts what runs inside it, in each thread, and nothing outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import xamp
from xamp.policy import LEVELS
from xamp.testing.exact import assert_same
from xamp.testing.lane import Lane
from xamp.testing.levels import batch, start, train
from xamp.testing.tier import Tier, casting, every_level

__all__ = ["Regions"]


class Regions(Tier):
    """A region casts what runs inside it, and nothing outside."""

    tier = "levels"

    @every_level
    def test_state_after_forward(self, lane: Lane, level: str) -> None:
        """A forward leaves autocast's state unchanged: also if it raises, and inside another model's forward."""
        model, _ = start(lane, level)
        other, _ = start(lane, "O0")
        before = _autocast(lane)

        def fail(_: torch.Tensor) -> None:
            raise KeyError("from inside")

        model(batch(lane))
        assert _autocast(lane) == before
        with pytest.raises(KeyError):
            model(batch(lane), fail)
        assert _autocast(lane) == before
        inside: list[Any] = []

        def nest(_: torch.Tensor) -> None:
            inside.append(_autocast(lane))
            other(batch(lane), lambda hidden: inside.append(hidden.dtype))
            inside.append(_autocast(lane))

        model(batch(lane), nest)
        assert inside == [inside[0], torch.float32, inside[0]]
        assert _autocast(lane) == before

    @every_level
    def test_plain_code_beside(self, lane: Lane, level: str) -> None:
        """Operators outside the model run as without xamp, before and after a training step."""
        x = torch.rand(4, 4, device=lane.device)
        plain = [x @ x, torch.softmax(x, 0), (x @ x).exp()]
        model, optimizer = start(lane, level)
        for _ in range(2):
            for found, wanted in zip([x @ x, torch.softmax(x, 0), (x @ x).exp()], plain, strict=True):
                assert_same(found, wanted, "plain code")
            train(model, optimizer, lane)

    @every_level
    def test_threads(self, lane: Lane, level: str) -> None:
        """The model gives the same results in two other threads at once."""
        model, _ = start(lane, level)
        model.eval()
        wanted, seen = model(batch(lane)), dict(model.seen)
        found: list[Any] = []

        def work() -> None:
            for _ in range(5):
                found.append((model(batch(lane)), dict(model.seen)))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 10
        for out, dtypes in found:
            torch.testing.assert_close(out, wanted)
            assert dtypes == seen

    @casting
    def test_disabled_inside(self, lane: Lane, level: str) -> None:
        """In a region ``torch.autocast(enabled=False)`` and ``disable_casts`` stop the casts until their block ends."""
        model, _ = start(lane, level)
        lower, seen = getattr(torch, str(LEVELS[level].dtype)), []

        def inner(_: torch.Tensor) -> None:
            x = torch.ones(4, 4, device=lane.device)
            for context in (torch.autocast(lane.kind, enabled=False), xamp.disable_casts()):
                with context:
                    seen.append((x @ x).dtype)
                    seen.append((x.to(lower) + 0).softmax(0).dtype)
                seen.append((x @ x).dtype)

        model(batch(lane), inner)
        assert seen == [torch.float32, lower, lower] * 2

    @casting
    def test_registered_function(self, lane: Lane, level: str) -> None:
        """A user's decorated function gets arguments in its registered dtype, in regions only."""
        model, _ = start(lane, level)
        lower = getattr(torch, str(LEVELS[level].dtype))
        half, full = xamp.half_function(_dtypes_of), xamp.float_function(_dtypes_of)
        promote = xamp.promote_function(_dtypes_of)
        x = torch.ones(2, device=lane.device)
        seen: list[Any] = []
        model(batch(lane), lambda hidden: seen.extend([half(x, hidden), full(hidden), promote(hidden, x)]))
        assert seen == [(lower, lower), (torch.float32,), (torch.float32, torch.float32)]
        y = x.to(lower)
        assert (half(x), full(y), promote(y, x)) == ((torch.float32,), (lower,), (lower, torch.float32))

    @casting
    def test_custom_operator(self, lane: Lane, level: str) -> None:
        """An operator of ``torch.library`` with an autocast rule follows it in a region."""
        model, _ = start(lane, level)
        lower = getattr(torch, str(LEVELS[level].dtype))
        seen: list[torch.dtype] = []
        with _operator(lane, lower) as twice:
            x = torch.ones(3, device=lane.device)
            model(batch(lane), lambda _: seen.append(twice(x).dtype))
            assert seen == [lower]
            assert twice(x).dtype == torch.float32

    def test_autocast(self, lane: Lane) -> None:
        """``xamp.autocast`` is fp16 by default, follows the portable table, and restores autocast's state."""
        lane.need("float16", "portable")
        before, x = _autocast(lane), torch.ones(4, 4, device=lane.device)
        with xamp.autocast():
            product = x @ x
            assert product.dtype == torch.float16
            assert torch.softmax(product, 0).dtype == torch.float32
            with xamp.autocast(enabled=False):
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.float16
        assert _autocast(lane) == before
        if lane.declares("bfloat16"):
            assert xamp.autocast(dtype=torch.bfloat16)(lambda: x @ x)().dtype == torch.bfloat16
        assert _autocast(lane) == before


def _autocast(lane: Lane) -> tuple[Any, ...]:
    kinds = ("cpu", lane.kind)
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _dtypes_of(*tensors: torch.Tensor) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors)


class _operator:
    """A context in which an operator exists that doubles its argument and has an autocast rule."""

    _count: Iterator[int] = iter(range(1 << 30))

    def __init__(self, lane: Lane, lower: torch.dtype) -> None:
        name = f"xamp_conformance::twice_{next(self._count)}"
        self._lane, self._lower = lane, lower
        self._made: Any = torch.library.custom_op(name, mutates_args=())(_twice)

    def __enter__(self) -> Any:
        try:
            self._made.register_autocast(self._lane.kind, self._lower)
        except ValueError:  # torch takes few device types here
            self._lane.lacks("autocast rules of torch.library's operators, which torch does not take here")
        return self._made

    def __exit__(self, *raised: object) -> None:
        self._made._lib._destroy()


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
