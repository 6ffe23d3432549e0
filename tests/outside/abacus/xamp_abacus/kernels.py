"""What the abacus computes: every operator, by its CPU kernel on the memory of the arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from xamp_abacus import autocast
from xamp_abacus.memory import ON_CPU, ON_SPARSE_CPU, allocate, device_type, host, is_here, move_in, wrap

__all__ = ["generator", "hidden", "install", "instead", "operator", "run", "watchers"]

generator = torch.Generator()
"""The device's random numbers, apart from those of the CPU."""

watchers: list[Callable[[Any, Any], None]] = []
"""What is called with each operator and its arguments before it runs, by a device that builds on this one."""
instead: dict[Any, Callable[..., Any]] = {}
"""By operator, what a device that builds on this one computes in its place, on tensors of the CPU."""

_CPU = torch.device("cpu")
_keys: Any = torch._C.DispatchKey  # its annotations lack some
_CPU_AUTOCAST = torch._C.DispatchKeySet(_keys.AutocastCPU)

# As on other accelerators, these take tensors of the CPU beside their own: indices and lengths.
_TAKES_CPU = {"index", "index_put_", "_index_put_impl_", "_ctc_loss", "_ctc_loss_backward", "_pack_padded_sequence"}
# Operators on sparse tensors that see to their parts, which are tensors of the device, and to no memory.
_PARTS = """_coalesced_ _dimI _dimV _indices _nnz _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _values clone copy_ copy_sparse_to_sparse_ dense_dim empty.memory_format indices is_coalesced sparse_dim
    sparse_resize_ sparse_resize_and_clear_ values"""


class _Shape(NamedTuple):
    """What the schema of an operator says.

    Attributes:
        written: place and name of each argument that is written to.
        returned: for each result the place and name of the argument that it is, None for a new one.
        tensors: places of arguments that must be tensors.
        draws: whether it takes a generator.
        takes_cpu: whether it takes tensors of the CPU beside those of the device.
    """

    written: list[tuple[int, str]]
    returned: list[tuple[int, str] | None]
    tensors: list[int]
    draws: bool
    takes_cpu: bool


_frames: Any = torch._C._dynamo.eval_frame
_skip = _frames._FrameAction.SKIP
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def hidden(kernel: _Kernel) -> _Kernel:
    """``kernel``, which the compiler does not trace, nor what it calls: on other devices no kernel is Python."""
    code: Any = kernel
    _frames.set_code_exec_strategy(code.__code__, _frames._FrameExecStrategy(_skip, _skip))
    return kernel


@functools.cache
def _shape_of(op: Any) -> _Shape:
    arguments = op._schema.arguments
    written = {
        frozenset(argument.alias_info.before_set): (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    aliases = [None if r.alias_info is None else frozenset(r.alias_info.before_set) for r in op._schema.returns]
    returned = [None if alias is None else written.get(alias) for alias in aliases]
    tensors = [place for place, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]
    draws = any(argument.name == "generator" for argument in arguments)
    return _Shape(list(written.values()), returned, tensors, draws, op._schema.name.partition("::")[2] in _TAKES_CPU)


@hidden
def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` where the arguments are, and give what it gives."""
    for watch in watchers:
        watch(op, args)
    if op.is_view:
        return op.redispatch(ON_CPU, *args, **kwargs)
    shape = _shape_of(op)
    lent = [_lend(value, shape.takes_cpu) for value in args]
    named = {name: _lend(value, shape.takes_cpu) for name, value in kwargs.items()}
    if shape.draws and not isinstance(args[-1] if args else None, torch.Generator):
        named["generator"] = kwargs.get("generator") or generator
    if any(place < len(args) and isinstance(args[place], (bool, int, float, complex)) for place in shape.tensors):
        op = op.overloadpacket  # what was a number in C++ is one here, for which there is another overload
    with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):  # that of the CPU is none of the abacus's business
        made = instead.get(op, op)(*lent, **named)
    for place, name in shape.written:
        _return(*((args[place], lent[place]) if place < len(args) else (kwargs[name], named[name])))
    if not isinstance(made, tuple):
        return _keep(made, shape.returned[0], args, kwargs) if shape.returned else None
    return tuple(_keep(part, whose, args, kwargs) for part, whose in zip(made, shape.returned, strict=True))


def _lend(value: Any, takes_cpu: bool) -> Any:
    """The CPU's view of an argument."""
    if isinstance(value, torch.Tensor):
        if value.device.type == device_type():
            return host(value)
        if value.dim() and not takes_cpu:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device_type()}:0 and {value.device}!"
            )
        return value
    if isinstance(value, (list, tuple)):
        return [_lend(part, takes_cpu) for part in value]
    if isinstance(value, torch.device) and is_here(value):
        return _CPU
    return value


def _return(tensor: Any, lent: Any) -> None:
    """Follow what was written to where it had to move: an ``out`` of another size, a sparse tensor."""
    if isinstance(tensor, (list, tuple)):
        for one, its in zip(tensor, lent, strict=True):
            _return(one, its)
    elif tensor.is_sparse:
        _aten("copy_sparse_to_sparse_").redispatch(ON_SPARSE_CPU, tensor, wrap(lent))
    elif tensor.size() != lent.size():
        move_in(tensor, wrap(lent).untyped_storage(), lent)


def _keep(made: Any, whose: tuple[int, str] | None, args: Any, kwargs: Any) -> Any:
    """What the caller gets for a result: its own argument, or a new tensor."""
    if whose is not None:
        place, name = whose
        return args[place] if place < len(args) else kwargs[name]
    if isinstance(made, torch.Tensor):
        return wrap(made)
    return [_keep(part, None, (), {}) for part in made] if isinstance(made, (list, tuple)) else made


@hidden
def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between tensors of the device, and to and from the CPU."""
    _lend(target, True).copy_(_lend(source, True))
    return target


@hidden
def _resize_(tensor: Any, size: Any, *, memory_format: Any = None) -> Any:
    """Storages of another's memory cannot grow, so the tensor moves; its views stay where they were."""
    like = torch.empty(0, dtype=tensor.dtype, device=_CPU).set_(
        torch.UntypedStorage(0), tensor.storage_offset(), (0,), (1,)
    )
    like.resize_(size, memory_format=memory_format or torch.contiguous_format)
    storage, needed = tensor.untyped_storage(), like.untyped_storage().nbytes()
    if needed > storage.nbytes():
        grown = allocate(needed)
        _bytes(grown)[: storage.nbytes()] = _bytes(storage)
        storage = grown
    return move_in(tensor, storage, like)


def _bytes(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage.host)


@hidden
def _set_(tensor: torch.Tensor) -> torch.Tensor:
    return move_in(tensor, allocate(0), torch.empty(0, dtype=tensor.dtype, device=_CPU))


# torch takes a fused cell for granted on accelerators, and the CPU has none. Written above autograd, which follows.
@hidden
def _lstm_cell(inputs: Any, hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    gates = _biased(inputs, input_bias) + _biased(hidden, hidden_bias)
    enter, forget, new, out = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell, gates


@hidden
def _gru_cell(inputs: Any, hidden: Any, state: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    parts = zip(_biased(inputs, input_bias).chunk(3, 1), _biased(hidden, hidden_bias).chunk(3, 1), strict=True)
    (reset, its_reset), (update, its_update), (new, its_new) = parts
    new = (new + (reset + its_reset).sigmoid() * its_new).tanh()
    return (state - new) * (update + its_update).sigmoid() + new, inputs


def _biased(gates: Any, bias: Any) -> Any:
    return gates if bias is None else gates + bias


_libraries: list[torch.library.Library] = []  # what is registered goes when they go


def _library(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def operator(namespace: str, name: str) -> Any:
    """The operator of that name, with its overload behind a dot unless it has none."""
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


_aten = functools.partial(operator, "aten")


def _registered(key: str) -> list[str]:
    """The names of torch's own operators that have a kernel on a key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name[6:] for name in names if name.startswith("aten::")]


def install(lists: Mapping[str, str]) -> None:
    """Register all of it with torch, with autocast's ``lists``."""
    rest, own = _library("_"), _library("aten")
    rest.fallback(run, "PrivateUse1")
    rest.fallback(run, "SparsePrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own.impl("copy_", _copy_, "PrivateUse1")
    own.impl("resize_", _resize_, "PrivateUse1")
    own.impl("set_", _set_, "PrivateUse1")
    for name in ("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"):
        own.impl(name, functools.partial(_aten(name).redispatch, ON_CPU), "PrivateUse1")
    parts = _PARTS.split()
    for name in _registered("SparseCPU"):
        op = _aten(name)
        kernel = functools.partial(op.redispatch, ON_SPARSE_CPU) if name in parts else functools.partial(run, op)
        own.impl(name, kernel, "SparsePrivateUse1")
    own.impl("record_stream", lambda tensor, stream: None, "PrivateUse1")  # it has one queue
    own.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    # The first three would look for a library of the device; the rest would take two calls of run, one for the result.
    direct = _registered("CompositeExplicitAutogradNonFunctional")
    for name in ("convolution", "_convolution", "convolution_backward", *direct):
        if not (_aten(name).is_view or torch.Tag.inplace_view in _aten(name).tags):
            own.impl(name, functools.partial(run, _aten(name)), "PrivateUse1")
    autocast.install(own, _aten, lists)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            own.impl("_thnn_fused_lstm_cell", _lstm_cell, key)
            own.impl("_thnn_fused_gru_cell", _gru_cell, key)
