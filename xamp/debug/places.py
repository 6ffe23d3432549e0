"""Where an operator runs: in which module, in forward, in backward or in the optimizer's step.

torch calls the hooks of :class:`Places` around each module, so a stack of modules is known in forward. In backward the
engine evaluates a node that an operator of the forward made. Each node has a number, and :meth:`Places.note_node` keeps
the module in which the node with that number was made.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

from xamp.sessions.foreign import unwrap
from xamp.torch_compat.torch_private.autograd import current_autograd_node, get_sequence_nr
from xamp.torch_compat.torch_private.modes import tree_iter

__all__ = ["Place", "Places", "storage_of", "tensors_in"]


class Place(NamedTuple):
    """Where an operator ran.

    Attributes:
        module: the qualified name of the innermost module; the empty string for the model itself, and None outside of
            all modules.
        kind: the name of that module's class; empty outside.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        call: how many calls of this module had begun.
        recomputed: it was a forward that activation checkpointing repeats in backward.
    """

    module: str | None
    kind: str
    phase: str
    call: int = 1
    recomputed: bool = False

    def __str__(self) -> str:
        if self.module is None:
            return "outside of the modules" if not self.kind else self.kind
        name = repr(self.module) if self.module else "the model itself"
        return f"{name} ({self.kind})"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.stepping = 0


class Places:
    """Knows the names of modules and tensors of ``models``, and where the running operator is.

    Args:
        models: the models, in wrappers or not. The names of a second model and of later ones begin with ``models[1].``.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._stack = _Stack()
        self._calls: Counter[int] = Counter()
        self._numbers: list[int] = []  # of autograd nodes, ascending
        self._made: list[Place] = []  # where each of them was made
        self._names: dict[int, str] = {}
        self.models = [unwrap(model) for model in models]
        self._holders: dict[int, nn.Module] = {}
        for index, model in enumerate(self.models):
            prefix = f"models[{index}]" if index else ""
            for name, module in model.named_modules():
                self._names.setdefault(id(module), ".".join(part for part in (prefix, name) if part))
                self._holders.update({id(param): module for param in module._parameters.values() if param is not None})

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of modules and optimizers in the block. No module is changed: these hooks are torch's."""
        with contextlib.ExitStack() as stack:
            for made in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._begin_step),
                optimizers.register_optimizer_step_post_hook(self._end_step),
            ):
                stack.callback(made.remove)
            yield

    # ---------------------------------------------------------------- what torch calls

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.modules.append(module)
        self._calls[id(module)] += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        stack = self._stack.modules
        self.note_node(self._of_module(module, "forward"))  # of a node that has run no operator
        if any(found is module for found in stack):
            while stack.pop() is not module:  # modules whose call ended in an exception
                pass

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stack.stepping += 1

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stack.stepping -= 1

    # ---------------------------------------------------------------- the place

    def now(self) -> Place:
        """Return the place of the operator that runs now on this thread."""
        node: Any = current_autograd_node()
        if node is None:
            if self._stack.modules:
                return self._of_module(self._stack.modules[-1], "forward")
            return Place(None, "", "step" if self._stack.stepping else "forward")
        if self._stack.modules and torch.is_grad_enabled():
            return self._of_module(self._stack.modules[-1], "forward")._replace(recomputed=True)
        return self._of_node(node)

    def note_node(self, place: Place) -> None:
        """Remember that the autograd node that was made last on this thread was made at ``place``."""
        number = get_sequence_nr() - 1
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._made.append(place)

    def _of_module(self, module: nn.Module, phase: str) -> Place:
        kind = type(module).__name__
        name = self._names.get(id(module))
        if name is None:
            known = [self._names[id(outer)] for outer in self._stack.modules if id(outer) in self._names]
            if not known:
                return Place(None, f"a {kind} that is not part of the model", phase)
            name = f"{known[-1]}.<{kind}>".lstrip(".")
        return Place(name, kind, phase, self._calls[id(module)])

    def _of_node(self, node: Any) -> Place:
        held = getattr(node, "variable", None)
        owner = self._holders.get(id(held))
        if owner is not None:  # the node that adds a gradient to a parameter's
            return Place(self._names[id(owner)], type(owner).__name__, "backward", self._calls[id(owner)])
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._made[at]._replace(phase="backward") if at >= 0 else Place(None, "", "backward")

    # ---------------------------------------------------------------- tensors

    def owners(self) -> Iterator[nn.Module]:
        """Yield every module of the models."""
        for model in self.models:
            yield from model.modules()

    def tensors(self) -> Iterator[tuple[str, str, str, str, torch.Tensor]]:
        """Yield kind, qualified name, module's name and class, and tensor of each parameter, buffer and gradient."""
        for owner in self.owners():
            module = self._names.get(id(owner), "")
            for kind, held in (("parameter", owner._parameters), ("buffer", owner._buffers)):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    full = f"{module}.{name}" if module else name
                    yield kind, full, module, type(owner).__name__, tensor
                    if tensor.is_leaf and tensor.grad is not None:
                        yield "gradient", full, module, type(owner).__name__, tensor.grad


def storage_of(value: Any) -> int | None:
    """Return the address of a tensor's memory, the same for all its views; None where it has none."""
    try:
        return value.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested ``values``."""
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
