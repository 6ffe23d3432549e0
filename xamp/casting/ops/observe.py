"""What a device's autocast does with the overloads of the table, also of a device that is not there.

A device that is there runs the sample calls. One that is not is asked by fake tensors, which pass through its autocast
as real ones do; where they cannot run a call, the dtypes are read with which its arguments leave autocast. Autograd
cannot take fake tensors of a device for which torch was not built, and ends the process, so gradients are seen on
devices that are there. For showing and testing; never used in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from xamp.casting.ops.samples import Call, Sample, operator, samples
from xamp.casting.ops.table import RULES, Rule
from xamp.registry.causes import one_line

__all__ = ["Observed", "attempt", "expected", "has_entry", "is_present", "observe"]

_FIRST_RESULTS = {"_scaled_dot_product_flash_attention": 1}
"""Results that the rule speaks of, where others follow that only the backward needs."""

_LIMITS = ("not compiled with", "not linked with support", "INTERNAL ASSERT", "Could not run 'aten::")
"""What torch says of a device for which it was not built, and of an operator without a kernel."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """What came of one sample call.

    Attributes:
        sample: The call.
        given: The dtypes of its floating tensors, in turn.
        dtypes: Those of its floating results; empty after an error, and where they could not be observed.
        gradients: Those of the gradients of its floating inputs, None for an input without one. Empty for a device
            that is not there.
        error: The exception's class, and what it said; None where nothing was raised.
        unobserved: Why the dtypes could not be observed; empty where they were.
        wanted: What the table promises for the results; None where it promises an error.
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
        """Whether it is what the table promises; None where it could not be observed."""
        if self.unobserved:
            return None
        if self.wanted is None:
            return self.error is not None
        return self.error is None and set(self.dtypes) == {self.wanted}


def expected(rule: Rule, given: Sequence[torch.dtype], lower: torch.dtype, named: torch.dtype | None = None) -> Any:
    """The dtype that the table promises for the results of a call.

    Args:
        rule: The overload's.
        given: The dtypes of the call's floating tensors.
        lower: The region's dtype.
        named: The ``dtype`` argument of the call.

    Returns:
        A ``torch.dtype``, or None where the call is refused.
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
    """Runs the sample calls of ``overload`` under the native autocast of ``device_type``.

    Each with fp32 tensors, with tensors of the lower dtype, and under ``"promote"`` with the two mixed, in both orders.

    Args:
        overload: A name in the table.
        device_type: Of a device, whether or not it is there.
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
    """Runs one sample call.

    Args:
        sample: The call.
        device_type: Where.
        dtype: The lower dtype of autocast; None: outside of autocast.
        given: The dtypes of the call's floating tensors, in turn.
        present: Whether the device is there. None: as :func:`is_present` says.
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
    """Whether a tensor can be made on a device of this type."""
    try:
        torch.empty(1, device=device_type)
    except (AssertionError, RuntimeError, ImportError, AttributeError):  # torch without it or its module; no driver
        return False
    return True


def has_entry(overload: str, device_type: str) -> bool:
    """Whether the device's own autocast has an entry for ``overload``."""
    key = "PrivateUse1" if device_type == torch._C._get_privateuse1_backend_name() else device_type.upper()
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", f"Autocast{key}")


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Sets the state by hand: ``torch.autocast`` switches itself off for a device that is not there."""
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device_type, dtype is not None)
    torch.set_autocast_dtype(device_type, dtype or was[1])
    torch.set_autocast_cache_enabled(False)  # it would keep the samples' casts
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, was[0])
        torch.set_autocast_dtype(device_type, was[1])
        torch.set_autocast_cache_enabled(cached)


def _run(sample: Sample, device_type: str, given: tuple[torch.dtype, ...]) -> Observed:
    """On the device, forward and backward, the latter outside of autocast."""
    call = sample.call(device_type, *given)
    try:
        with torch.enable_grad():
            results = _results(sample, operator(sample.overload)(*call.args, **call.kwargs))
            with _autocast(device_type, None):
                gradients = _gradients(call, results)
    except Exception as error:  # whatever an operator raises is what was to be found out
        return _failed(sample, given, error)
    return Observed(sample, given, tuple(result.dtype for result in results), gradients)


def _results(sample: Sample, returned: Any) -> list[torch.Tensor]:
    """The floating tensors of which the rule speaks."""
    results = returned if isinstance(returned, tuple) else (returned,)
    floating = [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()]
    return floating[: _FIRST_RESULTS.get(sample.overload)]


def _gradients(call: Call, results: list[torch.Tensor]) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the gradients of the call's floating inputs."""
    differentiable = [tensor for tensor in call.inputs if tensor.requires_grad]
    total = [result.sum(dtype=torch.float32) for result in results if result.requires_grad]
    found = iter(torch.autograd.grad(total, differentiable, allow_unused=True))
    gradients = (next(found) if tensor.requires_grad else None for tensor in call.inputs)
    return tuple(None if gradient is None else gradient.dtype for gradient in gradients)


def _failed(sample: Sample, given: tuple[torch.dtype, ...], error: Exception) -> Observed:
    """An error that the device's user would see, or one that only says that here nothing can be seen."""
    text = str(error).partition("\n")[0]
    if any(limit in text for limit in _LIMITS):
        return Observed(sample, given, unobserved=text)
    return Observed(sample, given, error=(type(error), text))


def _run_fake(sample: Sample, device_type: str, given: tuple[torch.dtype, ...]) -> Observed:
    """On fake tensors, forward only."""
    with torch.no_grad(), FakeTensorMode(), _quiet():
        try:
            call = sample.call(device_type, *given, grad=False)
        except Exception as error:  # its module in torch is missing, or lacks what fake tensors ask it for
            return Observed(sample, given, unobserved=f"no fake tensor on {device_type}: {one_line(error)}")
        try:
            results = _results(sample, operator(sample.overload)(*call.args, **call.kwargs))
        except Exception as error:  # as in _run
            seen = _failed(sample, given, error)
        else:
            return Observed(sample, given, tuple(result.dtype for result in results))
        arrived = _arrival(sample, call) if seen.unobserved and has_entry(sample.overload, device_type) else set()
    return dataclasses.replace(seen, dtypes=tuple(arrived), unobserved="") if len(arrived) == 1 else seen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log each operator that raises, with its traceback."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


class _Arrived(Exception):
    """Ends a call where autocast handed it on."""


class _Arrivals(TorchDispatchMode):
    """Notes the dtypes of the floating arguments with which ``op`` is called, and calls it no more."""

    def __init__(self, op: torch._ops.OpOverload[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op = op
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._op:
            return func(*args, **(kwargs or {}))
        self.dtypes = {tensor.dtype for tensor in Call(args, kwargs or {}).inputs}
        raise _Arrived


def _arrival(sample: Sample, call: Call) -> set[torch.dtype]:
    """The dtypes of the floating tensors with which autocast hands the call on."""
    op = operator(sample.overload)
    mode = _Arrivals(op)
    # Below autograd a composite operator is seen whole; above, only what it is made of.
    with contextlib.suppress(_Arrived), torch._C._AutoDispatchBelowAutograd(), mode:
        op(*call.args, **call.kwargs)
    return mode.dtypes
