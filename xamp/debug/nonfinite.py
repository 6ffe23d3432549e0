"""``find_nonfinite``: which operator of which module made the first inf or nan of a training step.

A dispatch mode sees every operator, in forward, in backward and in the optimizer's step, after autocast has cast its
arguments. Each result is tested, so a block under it takes several times as long, and waits for the device at each
operator. Outside of the block nothing runs.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.debug.finding import Finding, Kind, Step
from xamp.debug.origins import Origins
from xamp.debug.places import Place, Places, storage_of, tensors_in
from xamp.debug.ranges import Range, dense, is_finite, range_of
from xamp.errors import PolicyError, StateError
from xamp.scaling.optimizer import managed_by
from xamp.sessions.session import find_session
from xamp.torch_compat.torch_private import dynamo
from xamp.torch_compat.torch_private.modes import TorchDispatchMode, tree_map
from xamp.values.arguments import number_between

__all__ = ["NonFinite", "find_nonfinite"]

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def find_nonfinite(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: Any = None,
    history: int = 5,
) -> NonFinite:
    """Watch the operators of a block, and keep where the first inf or nan comes from.

    ::

        with xamp.debug.find_nonfinite(model, optimizer) as found:
            loss = criterion(model(x), y)
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        print(found.report)

    The block runs as it would without: same results, same random numbers. It may hold a forward, a backward, a step, or
    several of them. Compiled functions run eagerly in it. What a program writes on purpose is no finding: the -inf of
    an attention mask and what follows from it, and memory that ``torch.empty`` returns. On a chip that saturates there
    is no inf to find.

    Args:
        models: the model, or several, at any level, managed by xamp or not.
        optimizers: the optimizers of the block. Their session has the loss scale, where the models have none.
        scaler: a ``GradScaler`` of xamp or of torch, where one scales the loss.
        history: how many operators before the finding the report shows.

    Returns:
        A context manager that yields itself.

    Raises:
        PolicyError: an argument cannot be right.
    """
    given: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
    if not given or not all(isinstance(model, nn.Module) for model in given):
        kinds = ", ".join(type(model).__name__ for model in given) or "nothing"
        raise PolicyError(f"find_nonfinite(models={kinds}): must be an nn.Module, or a list of them.")
    history = int(number_between("history", history, -1, 2**31, whole=True, call="find_nonfinite"))
    owners: list[Any] = [*given, *_listed(optimizers)]
    return NonFinite(Places(given), _scale_of(owners, scaler), history)


class NonFinite:
    """What the block of :func:`find_nonfinite` came to.

    Attributes:
        first: the finding; None as long as all values are finite.
        operators: how many operators have run in the block.
    """

    def __init__(self, places: Places, scale: Callable[[], float], history: int) -> None:
        self.first: Finding | None = None
        self.operators = 0
        self._places = places
        self._scale = scale
        self._before: collections.deque[Step] = collections.deque(maxlen=history)
        self._origins = Origins()
        self._lock = threading.Lock()
        self._stack: contextlib.ExitStack | None = None

    @property
    def report(self) -> str:
        """The finding as text, or a line that says that all was finite."""
        if self.first is None:
            return f"All finite: no operator of {self.operators} made inf or nan."
        return str(self.first)

    def __str__(self) -> str:
        return self.report

    def __enter__(self) -> NonFinite:
        if self._stack is not None:
            raise StateError("find_nonfinite: this block is open already. Make a new one for each block.")
        with contextlib.ExitStack() as stack:
            if dynamo.is_imported():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings(
                    "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
                )
            stack.enter_context(self._places.watching())
            stack.enter_context(_Watch(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    # ---------------------------------------------------------------- one operator

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run ``operator(*args, **kwargs)``, and look at what it returns."""
        self.operators += 1
        if self.first is not None:
            return operator(*args, **kwargs)
        place = self._places.now()
        self._places.note_node(place)
        written = _written(operator, args, kwargs)
        kept = [value.clone() if list(dense(value)) else value for value in written]
        result = operator(*args, **kwargs)
        self._look(_Call(operator, args, kwargs, written, kept), place, [*tensors_in(result), *written])
        return result

    def _look(self, call: _Call, place: Place, results: Sequence[torch.Tensor]) -> None:
        bad = [found for found in results if not is_finite(found)]
        if not bad:
            self._origins.forget(results, tensors_in(call.args, call.kwargs))
            shown = next((found for found in results if list(dense(found))), None)
            if shown is not None and self._before.maxlen:
                self._before.append(Step(place, str(call.operator), range_of(shown)))
            return
        operands = [call.as_before(value) for value in tensors_in(call.args, call.kwargs)]
        sources = [
            value
            for value, before in zip(tensors_in(call.args, call.kwargs), operands, strict=True)
            if not is_finite(before)
        ]
        verdict, outside = self._origins.judge(call.name, (call.args, call.kwargs), sources, bad, call.written)
        if verdict:
            with self._lock:
                self.first = self.first or self._finding(call, place, bad[0], operands, outside)

    def _finding(
        self, call: _Call, place: Place, bad: torch.Tensor, operands: Sequence[torch.Tensor], outside: Any
    ) -> Finding:
        kind: Kind = "operator"
        tensor, scale, wide = "", 1.0, None
        if outside is not None:
            kind, tensor, place = self._outside(outside, place)
            bad = call.as_before(outside)
        else:
            wide = call.largest_in_wider()
            scale = self._scale()
            fits = wide is not None and wide / scale <= torch.finfo(bad.dtype).max
            kind = "loss scale" if place.phase == "backward" and scale > 1.0 and fits else kind
        ranges: list[Range] = [range_of(value) for value in operands if list(dense(value))]
        return Finding(
            kind, place.module, place.kind if place.module is not None else "", str(call.operator), place.phase,
            place.call, place.recomputed, tensor, range_of(bad), tuple(ranges), scale, wide, tuple(self._before),
        )  # fmt: skip

    def _outside(self, value: torch.Tensor, place: Place) -> tuple[Kind, str, Place]:
        """Return what a tensor is that held inf or nan when it came in, its name, and the place that owns it."""
        address = storage_of(value)
        for kind, name, module, module_class, tensor in self._places.tensors():
            if tensor is value or storage_of(tensor) == address:
                return kind, name, place._replace(module=module, kind=module_class)  # type: ignore[return-value]
        return "input", "", place


class _Watch(TorchDispatchMode):
    """Hands every operator to a :class:`NonFinite`."""

    supports_higher_order_operators = True

    def __init__(self, found: NonFinite) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._found.run(func, args, kwargs or {})


class _Call:
    """One call of an operator, with copies of what it writes into."""

    def __init__(
        self, operator: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
    ) -> None:
        self.operator = operator
        self.args, self.kwargs = args, kwargs
        self.written, self._kept = written, kept

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return str(self.operator).split(".")[1] if "." in str(self.operator) else str(self.operator)

    def as_before(self, value: torch.Tensor) -> torch.Tensor:
        """Return an argument as it was before the operator ran."""
        return next((kept for own, kept in zip(self.written, self._kept, strict=True) if own is value), value)

    def largest_in_wider(self) -> float | None:
        """Return the largest absolute value when the operator runs again in a wider dtype; None if that is not finite.

        None also where it draws random numbers, or has no kernel for the wider dtype.
        """
        if torch.Tag.nondeterministic_seeded in getattr(self.operator, "tags", ()):
            return None
        try:
            args, kwargs = tree_map(self._widened, (self.args, self.kwargs))
            found = [part for value in tensors_in(self.operator(*args, **kwargs)) for part in dense(value)]
        except Exception:  # whatever a kernel says of the dtype
            return None
        if not found or not all(map(is_finite, found)):
            return None
        return max((float(part.abs().max()) for part in found if part.numel()), default=None)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _WIDER.get(value, value)
        if not isinstance(value, torch.Tensor):
            return value
        value = self.as_before(value)
        # A cast into a lower dtype is done again from the values as they are.
        return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value.clone()


def _written(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes into."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = [(arg, kwargs.get(arg.name, args[i] if i < len(args) else None)) for i, arg in enumerate(schema.arguments)]
    return tensors_in([value for arg, value in named if arg.alias_info is not None and arg.alias_info.is_write])


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _scale_of(owners: Sequence[Any], scaler: Any) -> Callable[[], float]:
    """Return a function that reads the loss scale in use: that of the open ``scale_loss``, else the first one's."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise PolicyError(
            f"find_nonfinite(scaler={type(scaler).__name__}): no get_scale(). Pass a GradScaler of xamp or torch."
        )

    def scale() -> float:
        if scaler is not None:
            return float(scaler.get_scale())
        engines = [s.engine for owner in owners if (s := find_session(owner)) is not None]
        engines += [found.engine for owner in owners if (found := managed_by(owner)) is not None]
        scalers = [one for engine in engines if engine.enabled and engine.policy.scales for one in engine.scalers]
        open_ones = [one for engine in engines for one in engine.blocks.scalers() if one in scalers]
        return float((open_ones or scalers)[0].scale) if scalers else 1.0

    return scale
