"""``xamp.trace``: records a run for ``xamp compare``.

A step that is not sampled costs a few references to tensors that exist anyway. In a sampled step hooks of torch's look
at the results of modules, and the parameters are copied before the step to see what it changes. All statistics stay on
the device. They go to the host together, and are read when they have arrived (see :mod:`xamp.debug.mail`).
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.debug.mail import Mail
from xamp.debug.sample import Sample, per_element
from xamp.debug.trace_file import SCHEMA, WHAT, frame, names_frame, no_loss_frame, rows_frame, sample_frame
from xamp.errors import PolicyError, StateError
from xamp.scaling.counts import StepOutcome
from xamp.scaling.optimizer import managed_by
from xamp.scaling.step import OptimizerState
from xamp.sessions.foreign import optimizer_in, unwrap
from xamp.sessions.metrics import recorded_norm
from xamp.sessions.session import find_session
from xamp.values.arguments import number_between
from xamp.values.log import is_rank_zero
from xamp.values.version import __version__

__all__ = ["Recorder", "trace"]

EVERY = 200
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
    every = int(number_between("every", every, 0, 2**31, whole=True, call="trace"))
    first_step = int(number_between("first_step", first_step, -1, 2**32, whole=True, call="trace"))
    _check(path, model, optimizer)
    inner: Any = optimizer if isinstance(optimizer, Optimizer) else optimizer_in(optimizer)
    looks = model is not None and not any(map(_is_compiled, model.modules()))
    own = None if model is None else unwrap(model)
    return Recorder(os.fspath(path), own, inner, every, first_step, note, looks=looks)


def _check(path: object, model: object, optimizer: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise PolicyError(f"trace(path={type(path).__name__}): must be the name of a file.")
    if model is not None and not isinstance(model, nn.Module):
        raise PolicyError(f"trace(model={type(model).__name__}): must be an nn.Module.")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and optimizer_in(optimizer) is None:
        raise PolicyError(f"trace(optimizer={type(optimizer).__name__}): must be a torch.optim.Optimizer.")


class Recorder:
    """A trace that is being written; see :func:`trace`. It changes neither model nor optimizer.

    Attributes:
        path: the file; None on a rank that does not write.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        every: int,
        first: int,
        note: str,
        *,
        looks: bool,
    ) -> None:
        self._model, self._optimizer, self._every, self._step, self._first = model, optimizer, every, first, first
        self.path = _own_path(path)
        self._device = _device_of(model, optimizer)
        self._rows: list[tuple[Any, Any, Any, Any]] = []
        self._last_norm: torch.Tensor | None = None
        self._sample: Sample | None = None
        self._names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._looks = looks
        self._file = None if self.path is None else _opened(self.path)
        self._mail = Mail(self._write)
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
        found = managed_by(self._optimizer)
        if found is None:
            return _NAN, _NAN, _NAN
        engine, state = found
        scaler = engine.scalers[0]
        scale: Any = scaler.host_scale
        if engine.policy.dynamic:
            scale = float(scaler.scale) if scaler.scale.is_cpu else scaler.scale.clone()
        clipped = recorded_norm(state.optimizer)
        norm = None if clipped is self._last_norm else clipped
        self._last_norm = clipped
        return scale, _skipped(state), _NAN if norm is None else norm

    def _send_rows(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            first = self._step - len(rows)
            numbers = [_NAN if number is None else number for row in rows for number in row]
            none = no_loss_frame([first + index for index, (loss, *_) in enumerate(rows) if loss is None])
            self._mail.send(numbers, lambda found: rows_frame(first, found) + none)

    # ---------------------------------------------------------------- the samples

    def _begin_sample(self) -> None:
        if self._model is not None or self._optimizer is not None:
            self._sample = Sample(self._model, self._optimizer, looks=self._looks)

    def _end_sample(self) -> None:
        sample, self._sample = self._sample, None
        assert sample is not None, "the caller has asked"
        step, numbers = self._step, sample.end()
        names = (tuple(sample.results), tuple(sample.names))
        changed, self._names = names != self._names, names
        head = names_frame(*names, [name.rpartition(".")[0] for name in sample.names]) if changed else b""
        sizes = sample.sizes()
        self._mail.send(numbers, lambda found: head + sample_frame(step, per_element(found, sizes)))

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


def _skipped(state: OptimizerState) -> Any:
    last = state.outcomes.last  # on a device the step's own copy of its flag, 0.0 or 1.0: nothing is launched for it
    return last if isinstance(last, torch.Tensor) else float(last is StepOutcome.SKIPPED)


def _number(loss: Any) -> Any:
    if loss is None:
        return None
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.detach()) if loss.is_cpu else loss.detach()
    if isinstance(loss, (int, float)):
        return float(loss)
    shape = f", shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise PolicyError(
        f"recorder.step(loss): must be one number or a tensor of one, and is {type(loss).__name__}{shape}."
    )


def _own_path(path: str) -> str | None:
    rank = torch.distributed.get_rank() if _is_distributed() else 0
    return path.replace("{rank}", str(rank)) if "{rank}" in path else path if is_rank_zero() else None


def _opened(path: str) -> Any:
    try:
        return open(path, "wb", buffering=0)
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
