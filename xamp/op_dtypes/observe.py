"""Observes what a device's autocast does with the overloads of the table, even if the device is absent.

A present device runs the sample calls. For an absent device, fake tensors pass through its autocast as real tensors
would. If fake tensors cannot run a call, the dtypes with which its arguments leave autocast are read instead. Autograd
ends the process on fake tensors of a device for which torch was not built, so gradients are observed on present devices
only. This is for display and tests; training never uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.casting.ops.parts import operator
from xamp.casting.ops.table import RULES, Rule
from xamp.op_dtypes.samples import Call, Sample, samples
from xamp.registry.causes import one_line
from xamp.torch_compat.torch_private import dispatch
from xamp.torch_compat.torch_private.fake import FakeTensorMode
from xamp.torch_compat.torch_private.modes import TorchDispatchMode

__all__ = ["Observed", "attempt", "expected", "has_entry", "is_present", "observe"]

_FIRST_RESULTS = {"_scaled_dot_product_flash_attention": 1}
"""The number of results that the rule governs, where more results follow that only the backward needs."""

_UNOBSERVABLE = ("not compiled with", "not linked with support", "INTERNAL ASSERT", "Could not run 'aten::")
"""Parts of torch's errors for a device for which it was not built, and for an operator without a kernel."""

_NO_DRIVER = ("NVIDIA driver", "CUDA error: ", "HIP error: ", "cudaGetDeviceCount", "GPUs are available")
"""What a build of torch for a device says of one that is not there, or has no driver, where a kernel looks for it."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """The outcome of one sample call.

    Attributes:
        sample: The call.
        given: The dtypes of its floating tensors, in turn.
        dtypes: The dtypes of its floating results; empty after an error, or if they could not be observed.
        gradients: The dtypes of the gradients of its floating inputs, None for an input without one. Empty for an
            absent device.
        error: The exception's class and its text; None if nothing was raised.
        unobserved: Why the dtypes could not be observed; empty if they were.
        wanted: The dtype that the table promises for the results; None if it promises an error.
    """

    sample: Sample
    given: tuple[torch.dtype, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    gradients: tuple[torch.dtype | None, ...] = ()
    error: tuple[type[Exception], str] | None = None
    unobserved: str = ""
    wanted: torch.dtype | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the outcome is what the table promises; None if it could not be observed."""
        if self.unobserved:
            return None
        if self.wanted is None:
            return self.error is not None
        return self.error is None and set(self.dtypes) == {self.wanted}


def expected(rule: Rule, given: Sequence[torch.dtype], lower: torch.dtype, named: torch.dtype | None = None) -> Any:
    """Return the dtype that the table promises for the results of a call.

    Args:
        rule: The rule of the overload.
        given: The dtypes of the call's floating tensors.
        lower: The region's dtype.
        named: The ``dtype`` argument of the call.

    Returns:
        A ``torch.dtype``, or None if the call is refused.
    """
    if rule.kind == "banned":
        return None
    if named is not None:
        return named
    if torch.float64 in given:
        return torch.float64
    if rule.kind == "lower":
        return lower
    return torch.float32 if rule.kind != "promote" or torch.float32 in given else lower


def observe(overload: str, device_type: str, dtype: torch.dtype) -> tuple[Observed, ...]:
    """Run the sample calls of ``overload`` under the native autocast of ``device_type``.

    Each call runs with fp32 tensors and with tensors of the lower dtype; under ``"promote"`` also with both mixed, in
    both orders.

    Args:
        overload: A name in the table.
        device_type: The type of a device, present or absent.
        dtype: The lower dtype, float16 or bfloat16.
    """
    given: list[tuple[torch.dtype, ...]] = [(torch.float32,), (dtype,)]
    if RULES[overload].kind == "promote":
        given += [(dtype, torch.float32), (torch.float32, dtype)]
    return tuple(attempt(sample, device_type, dtype, dtypes) for sample in samples(overload) for dtypes in given)


def attempt(
    sample: Sample,
    device_type: str,
    dtype: torch.dtype | None,
    given: Sequence[torch.dtype],
    *,
    present: bool | None = None,
) -> Observed:
    """Run one sample call.

    Args:
        sample: The call.
        device_type: The type of the device.
        dtype: The lower dtype of autocast; None runs the call without autocast.
        given: The dtypes of the call's floating tensors, in turn.
        present: Whether the device is present; None asks :func:`is_present`.
    """
    given = tuple(given)
    named = given[0] if sample.names_dtype else None
    wanted = expected(RULES[sample.overload], given, dtype or given[0], named)
    run = _run if (is_present(device_type) if present is None else present) else _run_fake
    with _autocast(device_type, dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators of the table are deprecated
        seen = run(sample, device_type, given)
    return dataclasses.replace(seen, wanted=wanted)


def is_present(device_type: str) -> bool:
    """Tell whether a tensor can be made on a device of this type."""
    try:
        torch.empty(1, device=device_type)
    except (AssertionError, RuntimeError, ImportError, AttributeError):  # not in torch, no module for it, no driver
        return False
    return True


def has_entry(overload: str, device_type: str) -> bool:
    """Tell whether the device's own autocast has an entry for ``overload``."""
    key = "PrivateUse1" if device_type == dispatch.get_privateuse1_backend_name() else device_type.upper()
    return dispatch.has_kernel_for_key(f"aten::{overload}", f"Autocast{key}")


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Set the autocast state by hand: ``torch.autocast`` switches itself off for an absent device."""
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device_type, dtype is not None)
    torch.set_autocast_dtype(device_type, dtype or was[1])
    torch.set_autocast_cache_enabled(False)  # the cache would keep casts of the samples
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, was[0])
        torch.set_autocast_dtype(device_type, was[1])
        torch.set_autocast_cache_enabled(cached)


def _run(sample: Sample, device_type: str, given: tuple[torch.dtype, ...]) -> Observed:
    """Run the call on the device, forward and backward. The backward runs outside of autocast."""
    call = sample.call(device_type, *given)
    try:
        with torch.enable_grad():
            results = _results(sample, operator(sample.overload)(*call.args, **call.kwargs))
            with _autocast(device_type, None):
                gradients = _gradients(call, results)
    except Exception as error:  # an operator may raise anything, and that is the outcome
        return _failed(sample, given, error)
    return Observed(sample, given, tuple(result.dtype for result in results), gradients)


def _results(sample: Sample, returned: Any) -> list[torch.Tensor]:
    """Return the floating results that the rule governs."""
    results = returned if isinstance(returned, tuple) else (returned,)
    floating = [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()]
    return floating[: _FIRST_RESULTS.get(sample.overload)]


def _gradients(call: Call, results: list[torch.Tensor]) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the gradients of the call's floating inputs."""
    differentiable = [tensor for tensor in call.inputs if tensor.requires_grad]
    total = [result.sum(dtype=torch.float32) for result in results if result.requires_grad]
    found = iter(torch.autograd.grad(total, differentiable, allow_unused=True))
    gradients = (next(found) if tensor.requires_grad else None for tensor in call.inputs)
    return tuple(None if gradient is None else gradient.dtype for gradient in gradients)


def _failed(
    sample: Sample, given: tuple[torch.dtype, ...], error: Exception, unobservable: Sequence[str] = _UNOBSERVABLE
) -> Observed:
    """Return the outcome of an error: an error that a user of the device would get, or "unobserved" on this machine."""
    text = str(error).partition("\n")[0]
    if any(part in text for part in unobservable):
        return Observed(sample, given, unobserved=text)
    return Observed(sample, given, error=(type(error), text))


def _run_fake(sample: Sample, device_type: str, given: tuple[torch.dtype, ...]) -> Observed:
    """Run the call on fake tensors, forward only."""
    with torch.no_grad(), FakeTensorMode(), _quiet():
        try:
            call = sample.call(device_type, *given, grad=False, values=False)
        except Exception as error:  # the device's module in torch is missing, or lacks what fake tensors need
            return Observed(sample, given, unobserved=f"no fake tensor on {device_type}: {one_line(error)}")
        try:
            results = _results(sample, operator(sample.overload)(*call.args, **call.kwargs))
        except Exception as error:  # as in _run
            seen = _failed(sample, given, error, (*_UNOBSERVABLE, *_NO_DRIVER))
        else:
            return Observed(sample, given, tuple(result.dtype for result in results))
        dtypes_seen = (
            _after_autocast(sample, call) if seen.unobserved and has_entry(sample.overload, device_type) else set()
        )
    return dataclasses.replace(seen, dtypes=tuple(dtypes_seen), unobserved="") if len(dtypes_seen) == 1 else seen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logger to which fake tensors report each operator that raises, with its traceback."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


class _Recorded(Exception):
    """Ends a call after autocast has passed it on."""


class _RecordDtypes(TorchDispatchMode):
    """Records the dtypes of the floating arguments of the call of ``op``, and ends the call."""

    def __init__(self, op: dispatch.OpOverload[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op = op
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._op:
            return func(*args, **(kwargs or {}))
        self.dtypes = {tensor.dtype for tensor in Call(args, kwargs or {}).inputs}
        raise _Recorded


def _after_autocast(sample: Sample, call: Call) -> set[torch.dtype]:
    """Return the dtypes of the floating tensors with which autocast passes the call on."""
    op = operator(sample.overload)
    mode = _RecordDtypes(op)
    # Below autograd, the mode gets a composite operator itself; above autograd, only the operators inside it.
    with contextlib.suppress(_Recorded), dispatch.AutoDispatchBelowAutograd(), mode:
        op(*call.args, **call.kwargs)
    return mode.dtypes
