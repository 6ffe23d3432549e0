"""``xamp.trace``: records a run for ``xamp compare``.

A step that is not sampled costs a few references to tensors that exist anyway. In a sampled step hooks of torch's look
at the results of modules, and the parameters are copied before the step to see what it changes. All statistics stay on
the device. They go to the host together, and are read when they have arrived (see :class:`_Mail`).
"""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from xamp.debug.ranges import dense
from xamp.debug.trace_file import NO_GRADIENT, SCHEMA, WHAT, frame, names_frame, rows_frame, sample_frame
from xamp.errors import PolicyError, StateError
from xamp.ground.log import is_rank_zero
from xamp.ground.version import __version__
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import copies_without_waiting, copy_without_waiting
from xamp.scaling.step import OptimizerState, StepOutcome
from xamp.sessions.session import find_session
from xamp.sessions.wrappers import optimizer_in, unwrap

__all__ = ["Recorder", "trace"]

EVERY = 100
"""By default, one step of so many is sampled."""

DENSE = 10
"""So many steps at the beginning are all sampled: most faults of a port show there."""

_BATCH = 16  # steps whose numbers go to the host together
_NAN = math.nan


def trace(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    every: int = EVERY,
    *,
    first_step: int = 0,
    note: str = "",
) -> Recorder:
    """Record a run into a file, for ``xamp compare``.

    ::

        with xamp.trace("gpu.trace", model, optimizer) as recorder:
            for x, y in loader:
                ...
                optimizer.step()
                recorder.step(loss)

    Each step: loss, loss scale, whether the step was skipped, and the norm that ``clip_grad_norm_`` returned. Each
    sampled step besides: for each module the root mean square, the largest absolute value and the share of zeros of its
    first result; for each parameter the norms of its gradient, of itself and of what the step changed. Sampled are the
    first 10 steps, and then one of ``every``. The results of modules that ``torch.compile`` traces are not seen.

    Args:
        path: the file, which is written anew. Only rank 0 writes; with ``{rank}`` in the name each rank does.
        model: the model, at any level, in any wrapper, before or after ``initialize``.
        optimizer: its optimizer.
        every: after the first 10 steps, one of so many is sampled; 1: all. Each sample costs part of a step's time.
        first_step: the number of the first step: that of the checkpoint from which a run goes on.
        note: any text, which ``xamp compare`` shows.

    Returns:
        A context manager with the method ``step``, which is to be called after each ``optimizer.step()``. It writes to
        the file as the run goes on: a killed process leaves all but its last 16 steps.

    Raises:
        PolicyError: an argument cannot be right, or the file cannot be written.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise PolicyError(f"trace(every={every!r}): must be a whole number, 1 or more.")
    if not isinstance(first_step, int) or isinstance(first_step, bool) or not 0 <= first_step < 2**32:
        raise PolicyError(f"trace(first_step={first_step!r}): must be a whole number, 0 or more.")
    if model is not None and not isinstance(model, nn.Module):
        raise PolicyError(f"trace(model={type(model).__name__}): must be an nn.Module.")
    inner = optimizer if isinstance(optimizer, Optimizer) or optimizer is None else optimizer_in(optimizer)
    if optimizer is not None and inner is None:
        raise PolicyError(f"trace(optimizer={type(optimizer).__name__}): must be a torch.optim.Optimizer.")
    if isinstance(path, (str, os.PathLike)):
        return Recorder(os.fspath(path), None if model is None else unwrap(model), inner, every, first_step, note)
    raise PolicyError(f"trace(path={type(path).__name__}): must be the name of a file.")


class Recorder:
    """A trace that is being written; see :func:`trace`. It changes neither model nor optimizer.

    Attributes:
        path: the file; None on a rank that does not write.
    """

    def __init__(
        self, path: str, model: nn.Module | None, optimizer: Optimizer | None, every: int, first: int, note: str
    ) -> None:
        self._model, self._optimizer, self._every, self._step, self._first = model, optimizer, every, first, first
        self.path = _own_path(path)
        self._device = _device_of(model, optimizer)
        self._rows: list[tuple[Any, Any, Any, Any]] = []
        self._last_norm: torch.Tensor | None = None
        self._sample: _Sample | None = None
        self._names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._compiled = model is not None and any(_is_compiled(module) for module in model.modules())
        self._file = None if self.path is None else _opened(self.path)
        self._mail = _Mail(self._write)
        if self._file is not None:
            self._write(frame("H", json.dumps(self._header(every, note)).encode()))
            self._begin_sample()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: Any = None) -> None:
        """Record a step. Call it after ``optimizer.step()``; does not wait for the device.

        Args:
            loss: the unscaled loss, a tensor of one element or a number; None where there is none.

        Raises:
            StateError: the trace is closed.
            PolicyError: the loss is no number.
        """
        if self._file is None:
            if self.path is not None:
                raise StateError(f"trace({self.path!r}).step(): the trace is closed. Make a new one.")
            return
        self._rows.append((_number(loss), *self._of_optimizer()))
        if self._sample is not None:
            self._end_sample()
        self._step += 1
        if len(self._rows) >= _BATCH:
            self._send_rows()
        if (self._step - self._first) < DENSE or self._step % self._every == 0:
            self._begin_sample()

    def close(self) -> None:
        """Write what is still on the device, and close the file. A second call does nothing."""
        if self._sample is not None:
            self._sample.stop()
            self._sample = None
        if self._file is not None:
            self._send_rows()
            self._mail.wait()
            self._write(frame("E", b""))
            self._file.close()
            self._file = None

    # ---------------------------------------------------------------- the numbers of each step

    def _of_optimizer(self) -> tuple[Any, Any, Any]:
        """Return loss scale, whether the step was skipped, and the norm from clipping: numbers or scalar tensors."""
        state = state_of(self._optimizer)
        if state is None:
            return _NAN, _NAN, _NAN
        engine = state.engine
        scaler = engine.scalers[0]
        scale: Any = scaler.host_scale
        if engine.policy.dynamic:
            scale = float(scaler.scale) if scaler.scale.is_cpu else scaler.scale.clone()
        norm = None if state.norm is self._last_norm else state.norm
        self._last_norm = state.norm
        return scale, _skipped(state), _NAN if norm is None else norm

    def _send_rows(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            first = self._step - len(rows)
            self._mail.send([number for row in rows for number in row], lambda found: rows_frame(first, found))

    # ---------------------------------------------------------------- the samples

    def _begin_sample(self) -> None:
        if self._model is not None or self._optimizer is not None:
            self._sample = _Sample(self._model, self._optimizer, looks=not self._compiled)

    def _end_sample(self) -> None:
        sample, self._sample = self._sample, None
        assert sample is not None, "the caller has asked"
        step, numbers = self._step, sample.end()
        names = (tuple(sample.results), tuple(sample.names))
        changed, self._names = names != self._names, names
        head = names_frame(*names, [name.rpartition(".")[0] for name in sample.names]) if changed else b""
        sizes = sample.sizes()
        self._mail.send(numbers, lambda found: head + sample_frame(step, _per_element(found, sizes)))

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "an open trace has a file"
        self._file.write(content)

    def _header(self, every: int, note: str) -> dict[str, Any]:
        found = find_session(self._optimizer) or find_session(self._model)
        policy = None if found is None else found.policy
        lower = None if policy is None or not found.engine.enabled else policy.dtype  # type: ignore[union-attr]
        device = self._device
        name = "" if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", str)(device)
        return {
            "what": WHAT,
            "schema": SCHEMA,
            "xamp": __version__,
            "torch": str(torch.__version__),
            "device": str(device),
            "device_name": str(name),
            "level": None if policy is None else policy.level,
            "dtype": str(lower or torch.get_default_dtype()).removeprefix("torch."),
            "every": every,
            "rank": torch.distributed.get_rank() if _is_distributed() else 0,
            "note": str(note),
        }


class _Sample:
    """The statistics of one step, between the end of the step before and its own end.

    Attributes:
        results: by module, in the order of calls: three tensors, and the number of elements.
        names: the names of the parameters.
    """

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None, *, looks: bool) -> None:
        self.results: dict[str, tuple[list[torch.Tensor], int]] = {}
        self._modules = {} if model is None else {id(m): name for name, m in model.named_modules()}
        self._optimizer = optimizer
        self.names, self._params = _parameters(model, optimizer)
        self._before = [value.clone() for value in _values(self._params)]
        self._gradients: list[torch.Tensor] | None = None
        self._hooks: list[Any] = []
        if looks and model is not None:
            self._hooks.append(hooks.register_module_forward_hook(self._look))
        if optimizer is not None:
            self._hooks.append(optimizers.register_optimizer_step_pre_hook(self._look_at_gradients))

    def stop(self) -> None:
        """Take the hooks away."""
        while self._hooks:
            self._hooks.pop().remove()

    def sizes(self) -> list[int]:
        """Return the number of elements of each result."""
        return [size for _, size in self.results.values()]

    def end(self) -> list[Any]:
        """Return all numbers of the sample, on the device."""
        self.stop()
        gradients = self._norms_of_gradients() if self._gradients is None else self._gradients
        after = _values(self._params)
        own = _norms(self._before)
        moved = _norms(torch._foreach_sub(after, self._before)) if after else []
        numbers = [number for found, _ in self.results.values() for number in found]
        return numbers + [number for each in zip(gradients, own, moved, strict=True) for number in each]

    def _look(self, module: nn.Module, args: Any, result: Any) -> None:
        name = self._modules.get(id(module))
        if name is None or name in self.results or not torch.is_grad_enabled():
            return  # evaluation between two steps has no gradients
        if torch._C._current_autograd_node() is not None:
            return  # activation checkpointing repeats a forward
        value = next((part for found in _tensors(result) for part in dense(found)), None)
        if value is not None and value.numel():
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            norms = [torch.linalg.vector_norm(value, order, dtype=torch.float32) for order in (2, math.inf, 0)]
            self.results[name] = norms, value.numel()

    def _look_at_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and self._gradients is None:
            self._gradients = self._norms_of_gradients()

    def _norms_of_gradients(self) -> list[Any]:
        found = [next(dense(param.grad), None) for param in self._params]
        norms = iter(_norms([value for value in found if value is not None]))
        return [NO_GRADIENT if value is None else next(norms) for value in found]


class _Mail:
    """Takes numbers to the host without waiting for the device, and writes frames of them in order.

    On a device that has asynchronous copies a letter is read when its copy has arrived; elsewhere at once.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._waiting: collections.deque[tuple[Any, Any, Callable[[list[float]], bytes]]] = collections.deque()
        self._asynchronous: dict[torch.device, bool] = {}

    def send(self, numbers: Sequence[Any], make: Callable[[list[float]], bytes]) -> None:
        """Send ``numbers``, floats and scalar tensors; ``make`` gets them as floats and returns the frames."""
        far = [number for number in numbers if isinstance(number, torch.Tensor) and not number.is_cpu]
        if not far:
            self.wait()
            self._write(make([float(number) for number in numbers]))
            return
        packed = torch.stack([number.detach().float().reshape(()) for number in far])
        if self._asynchronous.setdefault(packed.device, copies_without_waiting(packed.device)):
            copy, event = copy_without_waiting(packed)
        else:
            copy, event = packed.cpu(), None
        self._waiting.append((copy, event, lambda found: make(_merged(numbers, found))))
        while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].query()):
            self._deliver()

    def wait(self) -> None:
        """Write all letters. Waits for the device."""
        while self._waiting:
            if self._waiting[0][1] is not None:
                self._waiting[0][1].synchronize()
            self._deliver()

    def _deliver(self) -> None:
        copy, _, make = self._waiting.popleft()
        self._write(make(copy.tolist()))


def _merged(numbers: Sequence[Any], far: Sequence[float]) -> list[float]:
    arrived = iter(far)
    return [next(arrived) if isinstance(n, torch.Tensor) and not n.is_cpu else float(n) for n in numbers]


def _per_element(numbers: list[float], sizes: Sequence[int]) -> list[float]:
    """Turn the norm and the count of each result into a root mean square and a share of zeros."""
    for index, size in enumerate(sizes):
        numbers[3 * index] /= math.sqrt(size)
        numbers[3 * index + 2] = 1.0 - numbers[3 * index + 2] / size
    return numbers


def _norms(values: Sequence[torch.Tensor]) -> list[Any]:
    return list(torch._foreach_norm(list(values), 2, dtype=torch.float32)) if values else []


def _values(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [next(dense(param), torch.zeros(0)) for param in params]


def _parameters(model: nn.Module | None, optimizer: Optimizer | None) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors of what the optimizer steps, masters included; without one, of the model's."""
    own = {} if model is None else {id(param): (name, param) for name, param in model.named_parameters()}
    if optimizer is None:
        found = [pair for pair in own.values() if pair[1].requires_grad]
    else:
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        engine: Any = getattr(state_of(optimizer), "engine", None)
        given = [own[id(p)][0] if id(p) in own else f"parameter.{i}" for i, p in enumerate(stepped)]
        if engine is not None:
            given = [n if " " not in n else g for n, g in zip(engine.names_of(stepped), given, strict=True)]
        found = list(zip(given, stepped, strict=True))
    return [name for name, _ in found], [param for _, param in found]


def _skipped(state: OptimizerState) -> Any:
    if isinstance(state.outcome, torch.Tensor):
        return (state.outcome != 0).float()
    return float(state.outcome is StepOutcome.SKIPPED)


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result.values()) if isinstance(result, dict) else list(result) if isinstance(result, (list, tuple)) else []


def _number(loss: Any) -> Any:
    if loss is None:
        return _NAN
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.detach()) if loss.is_cpu else loss.detach()
    if isinstance(loss, (int, float)):
        return float(loss)
    shape = f", shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise PolicyError(f"recorder.step(loss): must be one number or a tensor of one, and is {type(loss).__name__}{shape}.")


def _own_path(path: str) -> str | None:
    rank = torch.distributed.get_rank() if _is_distributed() else 0
    return path.replace("{rank}", str(rank)) if "{rank}" in path else path if is_rank_zero() else None


def _opened(path: str) -> Any:
    try:
        return open(path, "wb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise PolicyError(
            f"trace({path!r}): the file cannot be written: {error.strerror}. Name one in a folder that is there."
        ) from error


def _device_of(model: nn.Module | None, optimizer: Optimizer | None) -> torch.device:
    held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    found = next(iter(held or ([] if model is None else list(model.parameters()))), None)
    return torch.device("cpu") if found is None else found.device


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
