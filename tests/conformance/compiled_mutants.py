"""What the clauses of tier ``compiled`` must notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from mutants import Mutant, patched, registered
from probe_mutants import Untried

from xamp.casting import active, forward
from xamp.scaling import engine
from xamp.sessions import lowering


class SeesNoOverflow(Untried):
    """Multiplies and never looks."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)


def without_region(mark: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is traced knows nothing of the policy."""
    return function(*args, **kwargs)


def without_op_policy(mark: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is traced is cast by the device's own list."""
    with torch.autocast(mark.device_type, dtype=mark.dtype, enabled=mark.dtype is not None):
        return function(*args, **kwargs)


def breaking(mark: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Cannot be traced in one piece."""
    torch._dynamo.graph_break()
    return function(*args, **kwargs)


_steps = [0]


def counting(mark: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Reads, while it is traced, a number that moves with the steps."""
    assert _steps[0] >= 0
    return (
        run_traced(mark, function, *args, **kwargs)
        if _steps[0] % 2 == 0
        else without_op_policy(mark, function, *args, **kwargs)
    )


run_traced = active.run_traced


@contextlib.contextmanager
def step_in_the_graph() -> Iterator[None]:
    """The number of the step is a constant of the graph, as a loss scale would be that the host reads."""
    leave = engine.Engine.leave

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        _steps[0] += 1
        leave(self, *args, **kwargs)

    with mock.patch.object(engine.Engine, "leave", counted), mock.patch.object(active, "run_traced", counting):
        yield


def never_left(module: Any, region: Any) -> Callable[[], None]:
    """Enters a policy for good."""
    enter_policy(module, region)
    return lambda: None


enter_policy = forward.enter_policy

MUTANTS = [
    Mutant("compiled in fp32", "compiled.trains_like_eager", patched(active, "run_traced", without_region)),
    Mutant("compiled by the native list", "compiled.result_dtypes", patched(active, "run_traced", without_op_policy)),
    Mutant("compiled anew at each step", "compiled.compiled_once", step_in_the_graph),
    Mutant("close leaves the region", "compiled.closed_session", patched(lowering, "enter_policy", never_left)),
    Mutant("sees no overflow", "compiled.overflow_is_skipped", registered(f"{__name__}:SeesNoOverflow"), "mutant"),
    Mutant(
        "a graph break",
        "compiled.default_compiler",
        patched(active, "run_traced", breaking),
        error="torch._dynamo.exc.Unsupported: Call to `torch._dynamo.graph_break()`",
    ),
]
