"""Each tensor among the arguments and results of a forward is cast once, whatever stands beside it.

Covers: xamp.casting.inputs, xamp.casting.forward, xamp.casting.write_back.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xamp


class Other:
    """An object that is not looked into."""


class Casts(TorchDispatchMode):
    """Counts the casts of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def model_that(forward: Callable[..., Any], **options: Any) -> Any:
    """A managed model at O2 that runs ``forward``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    model = Model()
    return xamp.initialize(model, level="O2", verbosity=0, **options)


BESIDE: dict[str, Any] = {
    "an object": Other(),
    "a deque": collections.deque([1]),
    "an integer of a class": type("Int", (int,), {})(3),
    "a parameter": nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_argument_is_cast_once_beside(name: str) -> None:
    model, found = model_that(lambda *args, **_: found.append(args)), []  # type: ignore[var-annotated]
    x, y = torch.ones(2), torch.ones(3)
    with Casts() as casts:
        model(x, [y, BESIDE[name], x], key=BESIDE[name])
    (args,) = found
    assert (args[0].dtype, args[1][0].dtype) == (torch.float16, torch.float16)
    assert args[1][2] is args[0]
    assert casts.count == 2 + isinstance(BESIDE[name], nn.Parameter)


@pytest.mark.parametrize("name", ["an object", "a deque", "an integer of a class"])
def test_a_result_is_cast_once_beside(name: str) -> None:
    half, other = torch.ones(2).half(), torch.ones(3).half()
    model = model_that(lambda: (half, {"again": half, "beside": BESIDE[name]}, other))
    with Casts() as casts:
        first, nested, last = model()
    assert (first.dtype, last.dtype) == (torch.float32, torch.float32)
    assert nested["again"] is first
    assert nested["beside"] is BESIDE[name]
    assert casts.count == 2


def test_a_dict_with_tensors_as_keys_is_put_in_the_order_of_its_copy() -> None:
    keys = [torch.ones(1), torch.ones(1)]
    given = {key: torch.full((2,), float(at)) for at, key in enumerate(keys)}

    def forward(batch: dict[Any, Any]) -> None:
        first = next(iter(batch))
        batch[first] = batch.pop(first)

    model_that(forward)(given)
    assert [key is keys[1 - at] for at, key in enumerate(given)] == [True, True]


def test_what_a_result_only_refers_to_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def failed() -> Exception:
        hidden = torch.ones(2).half()
        try:
            raise ValueError(f"{hidden.dtype} is no part of the result")
        except ValueError as error:
            return error

    model = model_that(lambda: (failed(), {torch.ones(2).half(): 1}.keys(), Other()))
    with caplog.at_level(logging.WARNING, "xamp"):
        model()
    assert caplog.messages == []


def test_a_dict_is_looked_into_whatever_its_class_says(caplog: pytest.LogCaptureFixture) -> None:
    class Attributes(dict[str, Any]):
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    outer = Other()
    outer.held = Attributes(values=3, x=torch.ones(2).half())  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "xamp"):
        assert model_that(lambda: outer)() is outer
    assert sum("Other" in message for message in caplog.messages) == 1


def test_an_object_that_stands_several_times_is_looked_at_once_a_call(caplog: pytest.LogCaptureFixture) -> None:
    plain, full = Other(), Other()
    full.tensor = torch.ones(2).half()  # type: ignore[attr-defined]
    returned = [plain]
    model = model_that(lambda: collections.UserDict(a=returned[0], b=[returned[0]], c={"a": returned[0]}))
    with caplog.at_level(logging.WARNING, "xamp"):
        for _ in range(3):
            model()
        returned[0] = full
        model()
    assert sum("Other" in message for message in caplog.messages) == 1


def test_an_error_of_a_class_is_not_told_as_raised_within_another() -> None:
    @dataclasses.dataclass
    class Held:
        read: Any = None

    def read(_: Held) -> Any:
        raise RuntimeError("read")

    held = Held()
    del held.__dict__["read"]
    Held.read = property(read)
    with pytest.raises(RuntimeError, match=r"^read$") as caught:
        model_that(lambda x, y: x)(torch.ones(2), held)
    assert caught.value.__context__ is None


def test_what_is_appended_to_a_list_that_counts_otherwise_comes_at_its_end() -> None:
    class Batch(list[Any]):
        def __len__(self) -> int:
            return 1

    given = Batch([torch.zeros(2), 2, 3])
    model_that(lambda batch: list.append(batch, 4))(given)
    assert [*list.__iter__(given)][1:] == [2, 3, 4]
