"""A region: the dtypes and the autocast state with which a method runs, and the method that runs in it.

``initialize`` compiles a policy into one :class:`Region`, a value that is compared, and shared by all methods of a
model. :func:`in_region` wraps a method once; what it returns is the hot path of every forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from xamp.casting import active, ops
from xamp.casting.autocast import Casts
from xamp.casting.features_in_use import needs
from xamp.casting.inputs import Lender
from xamp.casting.region_mark import Mark, mark_of
from xamp.casting.unseen_results import Unseen
from xamp.casting.write_back import take_back_traced
from xamp.torch_compat.compiler import keep_eager, own_code
from xamp.torch_compat.torch_private.autocast import is_autocast_enabled
from xamp.torch_compat.torch_private.distributed import ACTIVE_DDP, active_ddp, ddp_attributes
from xamp.torch_compat.torch_private.dynamo import IS_COMPILING, compiler_attributes
from xamp.values import followers
from xamp.values.containers import cast_floats, leaf_of, result_caster
from xamp.values.walk import TracedWalk

__all__ = ["Around", "Cast", "Region", "before_forward", "explain", "in_framed_region", "in_region", "is_framed"]

Cast = Callable[[Any, torch.dtype], Any]
"""Casts the floating tensors in any value: :func:`xamp.values.containers.cast_floats`, or another function."""


def _nothing(_: object = None) -> None:
    pass


def explain(error: Exception, module: nn.Module, region: Region) -> None:
    """See :func:`xamp.casting.dtype_errors.explain_forward`."""
    from xamp.casting import dtype_errors  # a training need not load it

    dtype_errors.explain_forward(error, module, region.input_dtype or region.autocast_dtype, casts=region.lowers)


class Around(NamedTuple):
    """The functions that run around the forwards of a managed model, of those who know processes and the step.

    Attributes:
        ddp_runs: called before a forward that a DistributedDataParallel runs.
        ddp_is_traced: the same while the compiler traces, with the id of that DDP. No graph holds the call.
        watch: runs a training forward, a function that gets the model, and looks for an overflow in it.
        cleared: called with the module whose ``zero_grad`` was called.
    """

    ddp_runs: Callable[[], object] = _nothing
    ddp_is_traced: Callable[[int], object] = _nothing
    watch: Callable[[nn.Module, Callable[..., Any], Any, Any], Any] | None = None
    cleared: Callable[[nn.Module], object] = _nothing


_BARE = Around()


@dataclasses.dataclass(frozen=True)
class Region:
    """The dtypes and the autocast state with which a method runs.

    Attributes:
        device_type: the device type whose autocast state is set.
        autocast_dtype: the dtype to which operators are cast; None switches autocast off inside.
        input_dtype: the dtype to which floating arguments are cast; None leaves them as they are.
        output_dtype: the dtype to which floating results are cast; None leaves them as they are.
        methods: the names of the methods that run in the region.
        op_policy: the name of the policy by which operators are cast.
        around: what is done around each forward. It has ``watch`` where the device saturates and shows no inf.
        cast: the function that casts arguments and results.
        apart: True: casts of the surrounding code are off inside, and the region sets its own autocast state.
            False: the method runs in the autocast state of its caller; only arguments and results are cast.
        follows: the parameters are cast. Before each call the model follows what else than a step changed in masters,
            or in copies that its state dict handed out.
        excluded: names of arguments, and types, that are not cast.
        lowers: the parameters are cast, and the state dict is fp32: a method that writes out the model records the
            dtype.
        explains: an error about dtypes says what to do.
        fp8: the recipe by which linear layers run in fp8; None: they do not.
    """

    device_type: str
    autocast_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    methods: tuple[str, ...] = ("forward",)
    op_policy: str = "native"
    around: Around = _BARE
    cast: Cast = cast_floats
    apart: bool = True
    follows: bool = False
    excluded: tuple[type | str, ...] = ()
    lowers: bool = False
    explains: bool = True
    fp8: str | None = None

    def autocast(self) -> Casts:
        """Return the region as a context manager, for code that is not a method of a module."""
        return Casts(self.mark)

    @property
    def does_something(self) -> bool:
        """Whether the region changes how a method runs."""
        dtypes = (self.autocast_dtype, self.input_dtype, self.output_dtype)
        return self.around.watch is not None or self.lowers or any(dtype is not None for dtype in dtypes)

    @property
    def mark(self) -> Mark:
        """The mark that the region leaves on its thread."""
        device, dtype = self.device_type, self.autocast_dtype
        casting = ops.casting(self.op_policy, device, dtype)
        return mark_of(device, dtype, self.op_policy == "portable", casting, self.fp8)


def in_region(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Wrap ``function(self, ...)`` so that it runs in ``region``. This is the hot path of every forward.

    A model with masters, and one that is made where there is a process group, gets the frame of :func:`_framed` around
    it. It takes 0.2 us, so other models go without: a DDP that is put around one later is noted by the method itself.
    """
    if is_framed(region):
        return _framed(in_framed_region(function, region), region)
    return _wrapped(function, region, notes=True)


def is_framed(region: Region) -> bool:
    """Return whether a method that is wrapped now for ``region`` gets the frame of :func:`_framed`."""
    return region.follows or (dist.is_available() and dist.is_initialized())


def in_framed_region(
    function: Callable[..., Any], region: Region, called: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wrap ``function(self, ...)`` so that it runs in ``region``, in the frame of :func:`_framed` or one like it.

    Args:
        function: the method.
        region: where it runs.
        called: what ``function`` calls with the same arguments but ``self``; it tells their names. None: itself.
    """
    return _wrapped(function, region, called, notes=False)


def _wrapped(
    function: Callable[..., Any], region: Region, called: Callable[..., Any] | None = None, *, notes: bool
) -> Callable[..., Any]:
    """Wrap ``function(self, ...)`` so that it runs in ``region`` and, with ``notes``, tells of the DDP that runs it."""
    device, on = region.device_type, region.autocast_dtype is not None
    mark = region.mark
    into, out_of = region.input_dtype, region.output_dtype
    is_traced, compiler, is_enabled = torch.compiler.is_dynamo_compiling, compiler_attributes, is_autocast_enabled
    enter, leave, number = active.enter, active.leave, active.next_number
    cast, apart, explains = region.cast, region.apart, region.explains
    run_traced = own_code(active.run_traced)

    named, bound = function if called is None else called, called is not None
    lender = None if into is None else Lender(named, into, cast, region.excluded, bound=bound)
    lend, lend_traced, take_back = (
        (None, None, None) if lender is None else (lender.lend, lender.lend_traced, lender.take_back)
    )
    unseen = Unseen(getattr(function, "__qualname__", type(function).__name__), out_of)
    cast_result = result_caster(out_of, cast, unseen)
    result_leaf, see_type = None if out_of is None else leaf_of(cast, out_of), unseen.of_type
    ddp, ddp_runs, ddp_is_traced, watch = ddp_attributes, *region.around[:3]

    def cast_traced(result: Any) -> Any:
        if out_of is None:
            return result
        if result_leaf is None:
            return cast(result, out_of)
        return TracedWalk(result_leaf, see_type, is_result=True).run(result)

    def traced(self: Any, args: Any, kwargs: Any) -> Any:
        lent = None
        if lend_traced is not None:
            args, kwargs, lent = lend_traced(args, kwargs)
        if notes and active_ddp() is not None:
            ddp_is_traced(id(active_ddp()))
        run: Callable[..., Any] = function
        first: tuple[Any, ...] = (self,)
        if apart and (on or is_enabled(device) or needs.replaced_outside):
            run, first = run_traced, (mark, function, self)
        if lent is None:
            result = run(*first, *args, **kwargs)
        else:
            try:
                result = run(*first, *args, **kwargs)
            finally:
                take_back_traced(lent)
        return cast_traced(result)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or compiler[IS_COMPILING]:  # is_compiling() is two calls: 0.3 us more
            return traced(self, args, kwargs)
        lent = None
        if lend is not None:
            args_given, kwargs_given = args, kwargs
            args, kwargs, lent = lend(args, kwargs)
        if notes and ddp[ACTIVE_DDP] is not None:
            ddp_runs()
        if not apart or (not on and not is_enabled(device) and not needs.replaced_outside):
            try:
                return cast_result(function(self, *args, **kwargs))
            except Exception as error:
                if explains:
                    explain(error, self, region)
                raise
            finally:
                if take_back is not None and lent is not None:
                    take_back(lent, args_given, kwargs_given)
        entered = None
        try:
            entered = enter(mark, number())
            return cast_result(function(self, *args, **kwargs))
        except Exception as error:
            if explains:
                explain(error, self, region)
            raise
        finally:
            if entered is not None:
                leave(entered)
            if take_back is not None and lent is not None:
                take_back(lent, args_given, kwargs_given)

    with contextlib.suppress(AttributeError):  # a callable object has no __name__
        functools.update_wrapper(method, function)
    traced, cast_traced = own_code(traced), own_code(cast_traced)
    return own_code(method) if watch is None else _watched(own_code(method), watch)


def _watched(method: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(self, method, (self, *args), kwargs)

    return own_code(watching)


def _framed(method: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Return ``method`` in a frame that calls :func:`before_forward`, which cannot be in a graph.

    The compiler skips this frame, and begins with that of ``method``.
    """
    follows, around = region.follows, region.around

    def framed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_forward(self if follows else None, around)
        return method(self, *args, **kwargs)

    with contextlib.suppress(AttributeError):
        functools.update_wrapper(framed, method)
    return keep_eager(framed, inner=False)


def before_forward(model: nn.Module | None, around: Around) -> None:
    """Tell of the DDP that runs a forward, and let ``model``, one with masters, follow them.

    Where the compiler traces another function that the forward is a part of, the DDP is told of while it traces, and
    masters are followed as :mod:`xamp.values.followers` says.
    """
    ddp = active_ddp()
    if torch.compiler.is_dynamo_compiling():
        if ddp is not None:
            around.ddp_is_traced(id(ddp))
        if model is not None:
            followers.catch_up_in_graph()
    else:  # also under torch.export
        if ddp is not None:
            around.ddp_runs()
        if model is not None:
            followers.catch_up(model)


keep_eager(before_forward, inner=False)
