"""torch.compile. Its parts are imported when they are used, or asked for only if something else has imported them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xamp.torch_compat.torch_private.late import if_imported, imported

__all__ = [
    "IS_COMPILING",
    "compiler_attributes",
    "config_entries",
    "functional_tensor",
    "get_tracing_state",
    "graph_break",
    "graphs_seen",
    "is_imported",
    "is_tracing",
    "list_functions",
    "peek_interpreter_stack",
    "rules_of_functions",
    "skip_code",
    "unsupported",
    "without_autograd_cache",
]

compiler_attributes: Mapping[str, Any] = vars(torch.compiler)
"""The attributes of ``torch.compiler``, for code that each forward runs: a look-up by :data:`IS_COMPILING`, whether
code is compiled or exported other than by dynamo, makes no call. ``torch.compiler.is_compiling()`` is two: 0.3 us."""

IS_COMPILING = "torch.compiler._is_compiling_flag".rpartition(".")[2]

get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
"""Returns the state of ``torch.jit.trace`` on this thread; None if it does not run."""

peek_interpreter_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost transform of ``torch.func`` on this thread; None if there is none."""


def is_imported() -> bool:
    """Return whether the compiler was imported, as its first use does."""
    return "torch._dynamo" in sys.modules


def is_tracing() -> bool:
    """Return whether this thread traces for a graph."""
    return torch._guards.TracingContext.try_get() is not None


def skip_code(code: types.CodeType, *, inner: bool) -> None:
    """Make the compiler skip frames of ``code``, and if ``inner`` also the frames of functions that it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip if inner else default))


def graph_break() -> None:
    """Break the graph that the caller is a part of."""
    torch._dynamo.graph_break()


def unsupported(message: str) -> Exception:
    """Return the error on which the compiler breaks the graph, or raises with ``fullgraph=True``."""
    return torch._dynamo.exc.Unsupported(message)


def graphs_seen() -> bool:
    """Return whether the compiler has compiled anything since its start or its last reset."""
    codes = if_imported("torch._dynamo.convert_frame.output_codes")
    return codes is not None and bool(codes.seen)


def list_functions() -> None:
    """Let the compiler list, once, torch's functions and methods by their names, before one of these is replaced."""
    imported("torch._dynamo.trace_rules.get_torch_obj_rule_map")()
    imported("torch._dynamo.trace_rules.get_tensor_method")()


def rules_of_functions() -> dict[Any, Any] | None:
    """Return the compiler's table of torch's functions; None if the compiler was not imported."""
    listed = if_imported("torch._dynamo.trace_rules.get_torch_obj_rule_map")
    return None if listed is None else listed()


def functional_tensor() -> Any:
    """Return the class of tensors while a graph is lowered; None if the compiler was not imported."""
    return if_imported("torch._subclasses.functional_tensor.FunctionalTensor")


def config_entries() -> dict[str, Any]:
    """Return the entries of ``torch.compiler.config``, with the defaults; none where torch keeps none."""
    entries: dict[str, Any] = getattr(torch.compiler.config, "_config", {})
    return entries


def without_autograd_cache() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the cache of backwards on disk, or an empty one if this torch cannot switch it off."""
    try:
        return imported("torch._functorch.config.patch")(enable_autograd_cache=False)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
