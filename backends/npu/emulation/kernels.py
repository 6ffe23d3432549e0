"""Replaces the card's kernels by Python kernels, for all operators that torch_npu registers.

An operator gets the first kernel of this list that fits:

1. views, and operators that allocate or describe memory: torch_npu's own kernel stays;
2. operators in the tables ``KERNELS`` of ``written``, ``missing_kernels``, ``private``, ``norms``, ``formulas``,
   ``attention`` and ``mx``: a kernel written by hand;
3. operators that torch composes of others: torch's composition, also above autograd if there is a formula, torch_npu's
   or torch's;
4. operators with a CPU kernel in torch: that kernel, over the card's memory (``generic``);
5. all others: a kernel that raises an error with the operator's name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xamp.backends.npu.emulation import (
    arithmetic,
    attention,
    deviations,
    formulas,
    late,
    limits,
    missing_kernels,
    mx,
    norms,
    private,
    products,
    randoms,
    sparse,
    written,
)
from xamp.backends.npu.emulation.crossing import CPU, Crossing, give, over
from xamp.backends.npu.emulation.torch_private import (
    AUTOCAST,
    NOT_HERE,
    ExcludeDispatchKeyGuard,
    OpOverload,
    forget_kernel,
    has_kernel_for_key,
    registrations_for_key,
)
from xamp.torch_compat.compiler import keep_eager

__all__ = ["install"]

# Keeps the libraries alive: when a library is deleted, its kernels are too.
_libraries: dict[str, torch.library.Library] = {}

_OURS = ("aten", "npu", "fsdp", "symm_mem", "npu_custom_dist")
_STAYS = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty_strided", "empty_like", "new_empty_strided"),
        *("_pin_memory", "is_pinned", "is_set_to", "record_stream"),
    )
)
# Operators that also accept CPU tensors beside those of the card.
_LENIENT = frozenset(
    f"aten::{name}"
    for name in ("index.Tensor", "index_put", "index_put_", "_index_put_impl_", "_ctc_loss", "_ctc_loss_backward")
)
# In these the host may wait for the card.
_WAITS = (
    "aten::copy_",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_to_copy",
    "aten::_local_scalar_dense",
)
_COMPUTED = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def install() -> None:
    """Register all kernels, once in a process, after torch_npu has registered its own."""
    has = has_kernel_for_key
    by_hand = {
        **written.KERNELS,
        **missing_kernels.KERNELS,
        **private.KERNELS,
        **norms.KERNELS,
        **formulas.KERNELS,
        **attention.KERNELS,
        **mx.KERNELS,
    }
    above = dict.fromkeys(_registered("AutogradPrivateUse1"))
    for name in _registered("PrivateUse1"):
        operator = _operator(name)
        if operator is None or _stays(operator):
            continue
        if name in by_hand:
            _put(name, _strict(operator, by_hand[name]))
        elif has(name, "CompositeImplicitAutograd"):
            _put(name, composed(operator))
            if has(name, "Autograd"):  # torch's own formula, which would call an operator of the card alone
                above[name] = None
        elif any(has(name, key) for key in _COMPUTED):
            kernel = _strict(operator, generic(operator))
            _put(name, randoms.seeded(operator, kernel) if randoms.draws(operator) else kernel)
        else:
            _put(name, refusal(name))
    for name in above:
        operator = _operator(name)
        if operator is not None and has(name, "CompositeImplicitAutograd"):
            _put(name, composed(operator), "AutogradPrivateUse1")
    for name, kernel in written.ADDED.items():
        _put(name, kernel)
    if torch.distributed.is_available():
        from xamp.backends.npu.emulation import distributed

        distributed.install()
        for name, kernel in distributed.KERNELS.items():
            _put(name, kernel)
    for name in _registered("SparsePrivateUse1"):
        operator = _operator(name)
        if operator is not None and name not in sparse.STAYS:
            _put(name, generic(operator), "SparsePrivateUse1")


def _registered(key: str) -> list[str]:
    return [name for name in registrations_for_key(key) if name.partition("::")[0] in _OURS]


def _operator(name: str) -> OpOverload | None:
    """The overload called ``name``; None if there is only a kernel of that name, which nobody can call.

    So it is where a release of torch_npu has put a Python function in the operator's place.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def _strict(operator: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which under ``--strict`` tells errors of indices late."""
    if not limits.STRICT:
        return kernel
    return late.waiting(kernel) if operator.name() in _WAITS else late.told_late(operator, kernel)


@functools.cache
def _overriding() -> dict[str, bool]:
    """How a library is told to replace a kernel that is written in Python; torch 2.7 cannot be told."""
    option = "allow_override"
    return {option: True} if option in inspect.signature(torch.library.Library.impl).parameters else {}


def _put(name: str, kernel: Callable[..., Any], key: str = "PrivateUse1") -> None:
    namespace, _, rest = name.partition("::")
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    options = _overriding()
    if not options:
        forget_kernel(namespace, rest, key)
    # Where a graph is broken torch calls a kernel from outside of it, and the compiler would trace that call.
    library.impl(rest, keep_eager(limits.guarded(name, deviations.apply(name, kernel))), key, **options)


def _stays(operator: OpOverload) -> bool:
    """Whether torch_npu's own kernel stays: it only changes strides and sizes, and updates torch_npu's records."""
    schema = operator._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return bool(operator.name() != "aten::contiguous")
    return operator.name() in _STAYS | private.STAYS or torch.Tag.inplace_view in operator.tags


def refusal(name: str) -> Callable[..., Any]:
    """A kernel for an operator that is not served. It raises, because otherwise the numbers would be wrong."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not served on an emulated Ascend card")

    return refuse


def composed(operator: OpOverload) -> Callable[..., Any]:
    """A kernel that runs torch's composition of other operators.

    On a card ``operator`` is one kernel, and autocast does not reach inside it. So autocast is off in the composition.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(AUTOCAST):
            return operator.decompose(*args, **kwargs)

    return kernel


def generic(operator: OpOverload) -> Callable[..., Any]:
    """A kernel that computes ``operator`` with torch's CPU kernel, on the card's memory."""
    schema = operator._schema
    name = operator.name()
    lenient = name in _LENIENT
    outs = frozenset(argument.name for argument in schema.arguments if argument.is_out)
    written_at = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    ]
    returned = [_returned_argument(schema, result) for result in schema.returns]
    many = len(returned) != 1
    watched = not arithmetic.moves(name)
    narrow = products.narrowing(name)
    # What such an operator makes anew may come of what it writes to; batch_norm's schema does not tell what it writes.
    makes_beside = "batch_norm" in name or (bool(written_at) and None in returned)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.DisableTorchFunction(), ExcludeDispatchKeyGuard(NOT_HERE):
            crossing = Crossing(name, lenient)
            values = [crossing.over(value) for value in args]
            named = {key: crossing.over(value) for key, value in kwargs.items() if key not in outs}
            sources = arithmetic.Sources(values, named.copy()) if watched and arithmetic.WATCHED else None
            for key in outs:
                named[key] = _fresh(crossing, kwargs[key])
            index = crossing.index
            if narrow is not None:
                values = narrow(values, index)
            if index < 0 or "device" in named:
                index = _redirect(named, index)
            written = []
            for position, key in written_at:
                if position < len(args):
                    values[position] = seen = sparse.writable(values[position])
                    written.append((args[position], seen))
                else:
                    named[key] = seen = sparse.writable(named[key])
                    written.append((kwargs[key], seen))
            if (
                sources is not None
                and arithmetic.SATURATES
                and (makes_beside or any(_overflows(to) for _, to in written))
            ):
                sources.finite()
            made = operator(*values, **named)
            if sources is not None:
                arithmetic.settle(made, index, sources)
                for key in outs:
                    arithmetic.settle(named[key], index, sources)
                for _, seen in written:
                    arithmetic.settle(seen, index, sources)
            for given, seen in written:
                sparse.put_back(given, seen, index)
            for key in outs:
                _fill(kwargs[key], named[key])
            if many:
                results = [
                    _result(result, argument, args, kwargs, index)
                    for result, argument in zip(made or (), returned, strict=True)
                ]
                return tuple(results) if results else None
            return _result(made, returned[0], args, kwargs, index)

    return kernel


def _overflows(value: Any) -> bool:
    """Whether what is written to ``value`` may raise the flag."""
    if isinstance(value, torch.Tensor):
        return value.dtype is torch.float16 or value.dtype is torch.float32
    return isinstance(value, (list, tuple)) and any(map(_overflows, value))


def _returned_argument(schema: Any, result: Any) -> tuple[int, str] | None:
    """Position and name of the argument that the schema says is returned; None if the result is new."""
    if result.alias_info is None:
        return None
    names = result.alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return position, argument.name
    return None


def _result(made: Any, argument: tuple[int, str] | None, args: Any, kwargs: Any, index: int) -> Any:
    if argument is not None:
        position, name = argument
        return args[position] if position < len(args) else kwargs[name]
    if isinstance(made, torch.Tensor) and index >= 0:
        return give(made, index)
    if isinstance(made, (list, tuple)):
        return [_result(each, None, args, kwargs, index) for each in made]
    return made


def _redirect(named: dict[str, Any], index: int) -> int:
    """Redirect a ``device=`` argument to the CPU; return the index of the card for the result, -1 for none."""
    device = named.get("device")
    if "device" in named:
        named["device"] = CPU
    if named.get("pin_memory") is not None:
        named["pin_memory"] = None
    if device is not None and device.type == "cpu":
        return -1
    if device is None and index >= 0:
        return index
    if device is None or device.index is None:
        return torch.accelerator.current_device_index()
    return int(device.index)


def _fresh(crossing: Crossing, value: Any) -> Any:
    """An empty CPU tensor for each ``out``: the operator decides its size, and ``out`` may overlap an argument."""
    if isinstance(value, (list, tuple)):
        return [_fresh(crossing, each) for each in value]
    if crossing.index < 0:
        crossing.index = value.get_device()
    return torch.empty(0, dtype=value.dtype, device=CPU)


def _fill(out: Any, made: Any) -> None:
    if isinstance(out, (list, tuple)):
        _fill_all(out, made)
        return
    if out.size() != made.size():
        out.resize_(made.size())
    over(out).copy_(made)


def _fill_all(outs: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
    for out, each in zip(outs, made, strict=True):
        _fill(out, each)
