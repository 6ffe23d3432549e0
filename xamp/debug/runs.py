"""Runs a batch through a copy of a model, and keeps the results and gradients of all modules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from xamp.casting.forward import forget_policy, is_under_policy
from xamp.debug.measured import Measured, Record
from xamp.debug.ranges import dense
from xamp.errors import PolicyError
from xamp.scaling import masters
from xamp.sessions.foreign import unwrap
from xamp.sessions.scale_loss import scale_loss
from xamp.sessions.session import find_session
from xamp.torch_compat.torch_private.autograd import current_autograd_node
from xamp.torch_compat.torch_private.modes import tree_map

__all__ = ["Batch", "copied", "measure"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a model is called with, and how its loss is made.

    Attributes:
        args, kwargs: the arguments.
        target: the second argument of ``loss``; None where it takes one.
        loss: makes the loss of the output; None: :func:`_usual_loss`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[..., Any] | None

    @classmethod
    def of(cls, model: nn.Module, batch: Any, target: Any, loss: Callable[..., Any] | None) -> Batch:
        """Take a batch apart; see :func:`xamp.debug.profile`.

        Raises:
            PolicyError: the loss takes other arguments than there are, or the forward needs what the loss takes.
        """
        wants_target = loss is not None and target is None and not _takes(loss, (None,))
        if isinstance(batch, (tuple, list)):
            args = tuple(batch)
            if len(args) > 1 and (wants_target or (loss is not None and target is None and not _takes(model, args))):
                args, target = _inputs(model, args, loss), args[-1]
        else:
            args = () if isinstance(batch, Mapping) else (batch,)
        given = (None,) if target is None else (None, target)
        if loss is not None and not _takes(loss, given):
            has = "output, and the batch holds no target" if target is None else "output and one target"
            raise PolicyError(
                f"profile(loss={_called(loss)}): it takes other arguments than the {has}. Pass target=y, or a batch "
                "(inputs, y), or loss=lambda output: ..., which uses what it needs."
            )
        return cls(args, dict(batch) if isinstance(batch, Mapping) else {}, target, loss)

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating tensors in ``dtype``."""

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        args, kwargs, target = tree_map(cast, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, self.loss)

    def copied(self) -> Batch:
        """Return the batch with copies of its tensors, which the model may write into."""

        def clone(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().clone().requires_grad_(value.requires_grad)

        args, kwargs, target = tree_map(clone, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, self.loss)

    def loss_of(self, output: Any) -> torch.Tensor:
        """Return the loss of an output.

        Raises:
            PolicyError: it is no tensor of one element.
        """
        if self.loss is None:
            found = _usual_loss(output)
        else:
            found = self.loss(output) if self.target is None else self.loss(output, self.target)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shape = f", shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
            raise PolicyError(
                f"profile(loss=...): the loss must be a tensor of one element, and is {type(found).__name__}{shape}. "
                "Reduce it, as with loss.mean(), or pass loss=lambda output: ..."
            )
        return found


def _inputs(model: nn.Module, batch: tuple[Any, ...], loss: Any) -> tuple[Any, ...]:
    """What of a batch with its target at the end is the forward's.

    Raises:
        PolicyError: the forward needs the last one too.
    """
    args = batch[:-1]
    if _takes(model, args):
        return args
    if len(args) == 1 and isinstance(args[0], (tuple, list)) and _takes(model, tuple(args[0])):
        return tuple(args[0])  # ((x, mask), y)
    if _takes(model, batch):
        raise PolicyError(
            f"profile(batch=...): {_called(loss)} takes the last of the batch's {len(batch)} as its target, and the "
            f"forward of {type(model).__name__} needs all of them. Pass target=y, or put the target behind them, as in "
            "(x, mask, y)."
        )
    return args


def _takes(called: Any, args: tuple[Any, ...]) -> bool:
    """Whether a module or a function takes so many arguments; what does not say so takes any."""
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _called(loss: Any) -> str:
    """How a loss is named in a message."""
    return getattr(loss, "__name__", "") or type(loss).__name__


def _usual_loss(output: Any) -> Any:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if own is not None:
        return own
    parts = [part for part in _floats(output) if part.numel()]
    if not parts:
        raise PolicyError("profile(loss=None): the output holds no floating tensor. Pass loss=lambda output: ...")
    total = sum(((part.abs() ** 2).mean() for part in parts[1:]), (parts[0].abs() ** 2).mean())
    return total.float() if total.dtype in masters.LOWER else total


def _floats(output: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(
        lambda v: found.append(v) if isinstance(v, torch.Tensor) and next(dense(v), None) is not None else v, output
    )
    return found


def copied(model: nn.Module) -> nn.Module:
    """Return a plain copy of a model with exact weights and without gradients.

    Raises:
        PolicyError: the model cannot be copied.
    """
    inner = unwrap(model)
    try:
        made = copy.deepcopy(inner)
    except Exception as error:  # whatever the model's own code raises
        raise PolicyError(
            f"profile(model={type(inner).__name__}): it works on copies, so that the model stays as it is, and this "
            f"one cannot be copied by copy.deepcopy: {type(error).__name__}: {error}. Often a module keeps a tensor of "
            "the graph, an open file or a lock in an attribute: clear it before the call, or give it a __deepcopy__."
        ) from error
    if any(is_under_policy(module) for module in made.modules()):
        forget_policy(made)
    sources = (*inner.parameters(), *inner.buffers())
    for own, source in zip((*made.parameters(), *made.buffers()), sources, strict=True):
        if masters.is_low_precision(source):
            own.data = masters.exact(source).detach().clone()
        own.grad = None
    return made


def measure(model: nn.Module, batch: Batch, optimizer: Optimizer | None = None) -> Measured:
    """Run a batch forward and backward through ``model``, and keep what its modules returned.

    Args:
        model: a copy, which this call uses up.
        batch: what it is called with.
        optimizer: the optimizer with which ``initialize`` managed it; None: it is plain.
    """
    found = Measured.of(find_session(model))
    with _random_numbers_as_before(model), _NoDropout(), torch.enable_grad(), contextlib.ExitStack() as stack:
        _silence_recurrent(model)
        stack.callback(_watch(model, found))
        batch = batch.copied()
        output = model(*batch.args, **batch.kwargs)
        found.output = [part.detach().clone() for part in _floats(output)]
        loss = batch.loss_of(output)
        found.loss = float(loss.detach())
        if loss.requires_grad and optimizer is not None:
            with scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        elif loss.requires_grad:
            loss.backward()
    found.take_gradients(model, optimizer)
    return found


def _watch(model: nn.Module, found: Measured) -> Callable[[], None]:
    """Keep results and their gradients in ``found``; return a function that ends this."""
    names = {id(module): name for name, module in model.named_modules()}
    begun: list[tuple[int, str | None]] = []  # the calls that run, and what had ended before each
    last: list[str] = []

    def before(module: nn.Module, args: Any) -> None:
        begun.append((id(module), last[-1] if last else None))

    def after(module: nn.Module, args: Any, result: Any) -> None:
        _, entry = begun.pop()
        if current_autograd_node() is not None:
            return  # activation checkpointing repeats a forward
        value = next((part for part in _floats(result)), None)
        if value is None or value.numel() == 0:
            return
        record = Record(type(module).__name__, entry, next(dense(value)).clone(), loss_scale=found.loss_scale)
        found.records.setdefault(names[id(module)], []).append(record)
        last.append(names[id(module)])
        if value.requires_grad:
            value.register_hook(record.take)

    handles = [
        handle
        for module in model.modules()
        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _NoDropout(TorchFunctionMode):
    """Lets dropout return its input, for runs in several dtypes draw several random numbers."""

    _DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").rstrip("_")
        if name in self._DROPOUTS or name == "feature_dropout":
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention" and len(args) < 5:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _silence_recurrent(model: nn.Module) -> None:
    """Take the dropout out of modules whose kernels draw it themselves."""
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0


@contextlib.contextmanager
def _random_numbers_as_before(model: nn.Module) -> Iterator[None]:
    """Give the block the random numbers that come next, and leave all generators as they were."""
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    device = next(model.parameters()).device
    with (
        torch.random.fork_rng(
            devices=[] if device.type == "cpu" else [device], device_type=None if device.type == "cpu" else device.type
        )
        if device.type != "cpu"
        else torch.random.fork_rng(devices=[])
    ):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
