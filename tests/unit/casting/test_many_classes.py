"""Each class of managed models is compiled as without xamp, however many there are: the compiler counts by code object.

It gives up on a code object after 8 graphs that did not fit. The reference is the same class in plain torch.

Covers: xamp.casting.forward, xamp.casting.region, xamp.casting.functions.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import xamp
import xamp.apex

# The tracer of torch itself asks what comes before a break for its .grad.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

CLASSES = 10
X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


_break: Any = torch._dynamo.graph_break
compiled: Any = torch.compile


def own(function: types.FunctionType) -> Any:
    """As if it were written once more: a function of its own code."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, closure=function.__closure__, argdefs=function.__defaults__
    )


def new_class(broken: bool) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if broken:
                _break()
            return torch.as_tensor(self.last(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encode(x)

    for name in ("encode", "forward"):
        setattr(Net, name, own(vars(Net)[name]))
    return Net


def assigned(model: Any) -> Any:
    """A forward that somebody put on the instance."""
    inner = type(model).forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        return inner(self, x)

    model.forward = types.MethodType(own(forward), model)  # type: ignore[arg-type]
    return model


WAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: new_class(broken=False)(),
    "broken": lambda: new_class(broken=True)(),
    "assigned": lambda: assigned(new_class(broken=False)()),
    "assigned, broken": lambda: assigned(new_class(broken=True)()),
    "encode": lambda: new_class(broken=False)(),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", WAYS)
def test_each_class_is_compiled(way: str, level: str) -> None:
    kept, graphs = [], []
    for _ in range(CLASSES):
        model, counter = WAYS[way](), CompileCounter()
        xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, verbosity=0)
        method = model.encode if way == "encode" else model
        dtype = next(model.parameters()).dtype if way == "encode" else X.dtype
        found = compiled(method, backend=counter)(X.to(dtype))
        torch.testing.assert_close(found, method(X.to(dtype)))
        kept.append((model, counter))
        graphs.append(counter.frame_count)
    assert min(graphs) == max(graphs) == graphs[0] > 0


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_forward_on_the_instance_is_one_graph(level: str) -> None:
    model = assigned(new_class(broken=False)())
    xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, verbosity=0)
    eager = model(X)
    torch.testing.assert_close(compiled(model, backend="eager", fullgraph=True)(X), eager)


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "autocast": xamp.autocast(dtype=torch.bfloat16),
    "half_function": xamp.half_function,
    "float_function": xamp.float_function,
    "promote_function": xamp.promote_function,
    "apex": xamp.apex.amp.half_function,
}


@pytest.mark.parametrize("decorator", DECORATORS)
def test_each_decorated_function_is_compiled(decorator: str) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        _break()
        return x * 2

    graphs = []
    for _ in range(CLASSES):
        counter = CompileCounter()
        decorated = DECORATORS[decorator](own(twice))  # type: ignore[arg-type]
        assert torch.equal(compiled(decorated, backend=counter)(X), X * 2)
        graphs.append(counter.frame_count)
    assert min(graphs) == max(graphs) == graphs[0] > 0
