"""Casts the parameters and buffers of models, and puts modules into the regions of the policy.

:class:`ModelCasts` checks the models and changes nothing. :meth:`ModelCasts.apply` makes the changes, and lists first
how to undo each of them. Both a failed ``initialize`` and ``session.close()`` unwind that list.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from xamp.casting.export import writes_its_dtype
from xamp.casting.forward import enter_policy
from xamp.casting.region import Around, Cast, Region
from xamp.contract import Backend
from xamp.distributed import ddp, fsdp, ranks
from xamp.errors import PolicyError
from xamp.policy import Policy, levels_where, listed
from xamp.scaling import masters
from xamp.scaling.gradients import clear_gradients
from xamp.scaling.masters import watch_state_dicts
from xamp.scaling.overflow_flag import run_watched
from xamp.torch_compat.norms import BATCH_NORM, NORM
from xamp.values.undo import Undo

__all__ = ["ModelCasts", "find_fp32_modules", "matching"]

_Values = tuple[torch.Tensor, "torch.Tensor | None"]
"""(the values of a parameter, its gradient)."""

_Place = tuple["weakref.ref[nn.Module]", str]
"""Where a parameter or buffer is: (the module, the name)."""

FEW = 4
"""So many values of a saved buffer are constants, one for each channel of a picture, and no table."""


class ModelCasts:
    """The changes to the models of one session. Making a plan changes nothing.

    The engine keeps the plan to undo the changes. The engine must not keep models alive, so the plan holds them weakly.
    The models come without their wrappers; ``cast`` casts their arguments and results.

    Attributes:
        low_precision: parameters to cast; of those that come in the lower dtype only a master is made.

    Raises:
        PolicyError: ``keep_fp32`` names a module that no model has; or FSDP shards a model otherwise than the policy
            needs: units that stay fp32 in part, or that are to be computed in another dtype, or shards that are not
            fp32.
    """

    def __init__(
        self, models: Sequence[nn.Module], policy: Policy, backend: Backend, device: torch.device, cast: Cast
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self.policy = policy
        self._backend = backend
        self._cast = cast
        self._device = device
        self._fp32_modules = [weakref.ref(module) for module in find_fp32_modules(models, policy.keep_fp32)]
        self.low_precision: list[nn.Parameter] = []
        self._units: list[tuple[fsdp.Unit, torch.dtype | None, bool]] = []  # each with its dtype, and whether the root
        self._buffers: list[_Place] = []
        self._raised: list[_Place] = []  # half parameters and buffers that become fp32
        self._half_buffers: list[_Place] = []  # those that stay half until the end
        # What a tensor was before the call, by its id, until the call is done: weakly itself, its values, its gradient.
        self._before: dict[Any, Any] = {}
        # By id of a low-precision parameter: the fp32 values and the gradient that it gets when the session is closed.
        self._restored: dict[int, _Values] = {}
        if policy.casts_parameters and policy.dtype != torch.float32:
            self._find_low_precision()
        # The low-precision values are made here: if memory runs out now, nothing has changed yet.
        self._values = [backend.plain(p.detach().to(policy.dtype)) for p in self.low_precision]

    def _find_low_precision(self) -> None:
        modules = self._modules()
        kept = {id(m) for module in self.fp32_modules() for m in module.modules()}
        if self.policy.keep_batchnorm_fp32:
            norms = (m for m in modules.values() if isinstance(m, BATCH_NORM))
            kept |= {id(m) for m in norms if m.affine or self.policy.keep_batchnorm_fp32 != "affine"}
        sharded = self._find_units(kept)
        kept_params = {id(p) for key in kept for p in modules[key]._parameters.values() if p is not None}
        # A model may come in the lower dtype already where masters are made.
        taken = {torch.float32, self.policy.dtype if self.policy.master_weights else torch.float32}
        seen = kept_params | sharded
        for module in (m for key, m in modules.items() if key not in kept):
            for param in module._parameters.values():
                if param is not None and param.dtype in taken and id(param) not in seen:
                    seen.add(id(param))
                    self.low_precision.append(param)
            self._buffers += [
                (weakref.ref(module), name)
                for name, b in module._buffers.items()
                if b is not None and b.dtype == torch.float32 and (b.dim() or not self.policy.spares_buffers)
            ]
        if self.policy.master_weights and self.policy.spares_buffers:
            self._find_halves([m for key, m in modules.items() if key in kept], list(modules.values()))

    def _find_units(self, kept: Collection[int]) -> set[int]:
        """Find the units that FSDP shards, and the dtype in which it is to gather; return the parameters' ids."""
        for model in self.models():
            for unit in fsdp.units_of(model):
                stay = [id(owner) in kept for owner in unit.owners]
                _check_unit(unit, stay, self.policy)
                if unit.dtype == torch.float32:
                    self._units.append((unit, None if all(stay) else self.policy.dtype, not unit.name))
        return {id(param) for param in fsdp.sharded_params(self._modules().values())}

    def _find_halves(self, kept: Iterable[nn.Module], modules: Iterable[nn.Module]) -> None:
        """Find the tensors besides the parameters to lower in a model that comes in the lower dtype."""
        found: set[int] = set()
        for module in kept:
            for name, tensor in _tensors_of(module).items():
                if tensor is not None and tensor.dtype in masters.LOWER and id(tensor) not in found:
                    found.add(id(tensor))
                    self._raised.append((weakref.ref(module), name))
        if any(param.dtype in masters.LOWER for param in self.low_precision):
            self._half_buffers = [
                (weakref.ref(module), name)
                for module in modules
                for name, b in module._buffers.items()
                if b is not None and b.dtype == self.policy.dtype and id(b) not in found
            ]

    def models(self) -> Iterator[nn.Module]:
        """Yield the models that are still alive."""
        return (model for ref in self._models if (model := ref()) is not None)

    def _modules(self) -> dict[int, nn.Module]:
        """Return all modules of the models that are still alive, by id."""
        return {id(module): module for model in self.models() for module in model.modules()}

    def fp32_modules(self) -> Iterator[nn.Module]:
        """Yield the modules that stay fp32 (``keep_fp32``): of each subtree the outermost one."""
        return (module for ref in self._fp32_modules if (module := ref()) is not None)

    def apply(self, undo: Undo, without_fp8: Iterable[nn.Module] = ()) -> None:
        """Cast parameters and buffers, and put the modules into their regions; some get one without fp8."""
        self._before = undo.before
        if self._raised:
            self._raise(undo)
        if self.low_precision or self._buffers:
            self._lower(undo)
        for unit, dtype, is_root in self._units:
            undo.steps.append(unit.compute_in(dtype, is_root))
        for model in self.models() if self.policy.casts_parameters else ():
            undo.steps.append(watch_state_dicts(model))
        for module, region in self._regions({id(module): module for module in without_fp8}):
            if region.does_something:
                undo.steps.append(enter_policy(module, region))

    def _regions(self, apart: Mapping[int, nn.Module]) -> Iterator[tuple[nn.Module, Region]]:
        """Yield the models, their parts that can be written out alone, and those that stay fp32, with their regions."""
        inside = self._around()._replace(watch=None)  # the model's own forward is watched
        models, kept = ({id(module): module for module in found} for found in (self.models(), self.fp32_modules()))
        yield from ((model, self._region(key in kept, key not in apart)) for key, model in models.items())
        if self.low_precision:
            whole = Region(self._device.type, None, None, None, methods=(), lowers=True, around=inside)
            inner = (m for key, m in self._modules().items() if key not in models and key not in kept)
            yield from ((module, whole) for module in inner if writes_its_dtype(type(module)))
        back = self.policy.dtype if self.policy.casts_parameters else None
        fp32 = Region(self._device.type, None, torch.float32, back, around=inside)
        yield from ((module, fp32) for key, module in kept.items() if key not in models)
        lower = Region(self._device.type, self.policy.dtype, None, None, op_policy=self.policy.op_policy, around=inside)
        yield from ((module, lower) for key, module in apart.items() if key not in models)

    def _around(self) -> Around:
        """Return the :class:`Around` of the forwards of the models."""
        saturates = self.policy.checks and self._backend.capabilities(self._device).overflow == "flag"
        watch = run_watched if saturates else None
        return Around(ddp.note_wrapper, ddp.note_wrapper_while_tracing, watch, clear_gradients)

    def _region(self, kept_whole: bool, in_fp8: bool) -> Region:
        policy = self.policy
        lower = policy.dtype if policy.autocast and not kept_whole else None
        into = torch.float32 if kept_whole else policy.input_dtype
        return Region(
            *(self._device.type, lower, into, policy.output_dtype, policy.methods, policy.op_policy, self._around()),
            *(self._cast, policy.apart, policy.casts_parameters, policy.excluded_inputs),
            bool(self.low_precision) and not kept_whole,
            fp8=policy.fp8 if in_fp8 and not kept_whole else None,
        )

    def _lower(self, undo: Undo) -> None:
        undo.preparing.append(self._prepare_fp32)
        undo.steps.append(self._restore_fp32)
        for param, value in zip(self.low_precision, self._values, strict=True):
            grad = param.grad
            self._before[id(param)] = param.data, grad
            with torch.inference_mode(False):  # an inference tensor has no version, by which changes are seen
                is_needed, exact = self.policy.master_weights, self._backend.plain
                master = nn.Parameter(exact(param.data.float())) if is_needed else None
            masters.set_low_precision(param, master)  # from here on the undo knows that the parameter has changed
            _put(param, value, None)
            stepped = param if master is None else master
            stepped.grad = None if grad is None else grad.to(stepped.dtype)
        for module, name, buffer in _alive(self._buffers):
            cast = buffer.to(self.policy.dtype)
            masters.set_low_precision(cast, original=buffer)
            module._buffers[name] = cast
        self._values = []
        self._flatten_rnns()
        changed = {id(param) for param in self.low_precision}
        for rnn in self._rnns():  # let the backend join the weights that torch left apart
            weights: list[Any] = rnn._flat_weights
            if all(id(w) in changed for w in weights) and len({w.untyped_storage().data_ptr() for w in weights}) > 1:
                from xamp.casting.ops.layers import join_weights  # what has no such layer need not load it

                join_weights(rnn, self._backend.join_weights_)

    def _rnns(self) -> Iterator[nn.RNNBase]:
        return (module for module in self._modules().values() if isinstance(module, nn.RNNBase))

    def _flatten_rnns(self) -> None:
        """Put the weights of recurrent layers into one block again. Some devices keep them so, and a cast splits it."""
        for rnn in self._rnns():
            rnn.flatten_parameters()

    def doubtful_buffers(self) -> tuple[list[str], list[str]]:
        """Name the low-precision buffers in which digits count, where the level spares buffers.

        Running statistics of torch's norms are what the level says (``keep_batchnorm_fp32``), and not named.
        docs/levels.md has on which models this rule was measured.

        Returns:
            Those that hold other values since they were cast: a table of frequencies or positions, a codebook. A
            persistent one of up to :data:`FEW` values is not among them: a mean of pixels is rounded as weights are.
            And those that a state dict holds and that are all zeros, or one whole number: mostly a count or a sum.
        """
        rounded, counts = [], []
        for model in self.models() if self.policy.spares_buffers else ():
            for prefix, module in model.named_modules():
                for name, buffer in () if isinstance(module, NORM) else module._buffers.items():
                    if buffer is None or not masters.is_low_precision(buffer):
                        continue
                    shown = f"{prefix}.{name}".lstrip(".") + f" of {type(module).__name__}"
                    exact, saved = masters.fp32_of(buffer), name not in module._non_persistent_buffers_set
                    if saved and (not bool(exact.any()) or (exact.numel() == 1 and float(exact).is_integer())):
                        counts.append(shown)
                    elif (not saved or exact.numel() > FEW) and not torch.equal(exact, buffer.float()):
                        rounded.append(shown)
        return sorted(rounded), sorted(counts)

    def _raise(self, undo: Undo) -> None:
        """Cast the fp16 and bf16 tensors of modules that stay fp32 to fp32."""
        before = undo.before  # is empty once the call is done: a session that ends gives back fp32 tensors

        def put_back() -> None:
            for ref, values, grad in before.get("halves", ()):
                if (tensor := ref()) is not None:
                    _put(tensor, values, grad)

        undo.steps.append(put_back)
        halves = before["halves"] = []
        for _, _, tensor in _alive(self._raised):
            halves.append((TensorWeakRef(tensor), tensor.data, tensor.grad))
            _put(tensor, tensor.data.float(), None if tensor.grad is None else tensor.grad.float())

    def _prepare_fp32(self) -> None:
        """Allocate the tensors that :meth:`_restore_fp32` gives back. Changes no parameter."""
        self._restored = {}
        self._restored = {id(p): self._fp32_of(p) for p in self.low_precision if masters.is_low_precision(p)}

    def _fp32_of(self, param: nn.Parameter) -> _Values:
        """Return values and gradient of a low-precision parameter: from before the call, or in fp32 once it is done."""
        if id(param) in self._before:
            return self._before[id(param)]  # type: ignore[no-any-return]
        master = masters.master_of(param)
        exact = param if master is None else masters.exact(param)
        full, grad = exact.data.float(), exact.grad
        return full, None if grad is None else grad.to(full.dtype)

    def _restore_fp32(self) -> None:
        """Give each cast parameter its fp32 values and its gradient back, and each cast buffer its values."""
        for param in self.low_precision:
            if not masters.is_low_precision(param):
                continue  # it was never changed, or is restored already
            if id(param) not in self._restored:
                self._restored[id(param)] = self._fp32_of(param)
            _put(param, *self._restored[id(param)])
            masters.forget_low_precision(param)
        self._restored = {}
        for module, name, buffer in _alive(self._buffers):
            if buffer.dtype in masters.LOWER:
                module._buffers[name] = masters.fp32_of(buffer)
                masters.forget_low_precision(buffer)
        if not self._before:  # a call that fails has not cast them
            for module, name, buffer in _alive(self._half_buffers):
                module._buffers[name] = buffer.float()
        self._flatten_rnns()


def _check_unit(unit: fsdp.Unit, stay: Sequence[bool], policy: Policy) -> None:
    """Raise a PolicyError where FSDP cannot gather a unit as ``policy`` needs; ``stay``: which owners stay fp32."""
    at, place = f"initialize(level={policy.level!r}):", f"{unit.name!r}" if unit.name else "the model"
    if any(stay) and not all(stay):
        owner = unit.owners[stay.index(True)]
        kind, norm = type(owner).__name__, ", or keep_batchnorm_fp32=False" if isinstance(owner, BATCH_NORM) else ""
        raise PolicyError(
            f"{at} FSDP gathers the parameters of {place} in one piece, in one dtype, and there is a {kind} among them "
            f"that stays fp32, and others that do not. Shard each {kind} by itself before the rest: "
            f"fully_shard(module), or FullyShardedDataParallel(module){norm}."
        )
    if unit.dtype in masters.LOWER:
        raise PolicyError(
            f"{at} the parameters of {place} were {unit.dtype} when FSDP sharded them. The fp32 shards are the "
            f"masters: call model.float() before sharding. FSDP gathers in {policy.dtype} all the same."
        )
    if unit.dtype == torch.float32 and not all(stay) and unit.computes_in not in (None, policy.dtype):
        same = [row for row in levels_where(lambda row: row.master_weights) if row != policy.level]
        raise PolicyError(
            f"{at} FSDP was told to compute {place} in {unit.computes_in}, and this level computes in {policy.dtype}. "
            f"Give fully_shard mp_policy=xamp.fsdp_policy({policy.level!r}), or no mixed precision of its own; or use "
            f"{listed(same)}."
        )


def _put(tensor: torch.Tensor, values: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give ``tensor`` values, and a gradient, of another dtype."""
    tensor.grad = None  # a gradient must have its tensor's dtype
    ranks.set_data(tensor, values)
    tensor.grad = grad


def _alive(places: Iterable[_Place]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the tensors at ``places`` that are still there, with their modules and names."""
    for ref, name in places:
        module = ref()
        if module is not None and (tensor := _tensors_of(module).get(name)) is not None:
            yield module, name, tensor


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def find_fp32_modules(models: Sequence[nn.Module], keep: Sequence[type | str]) -> list[nn.Module]:
    """Return the modules to run in fp32: the outermost that ``keep`` matches, and those with a parameter of theirs."""
    found, covered = matching(models, keep, "keep_fp32")
    return [*found, *_tied_to(found, covered, models)]


def matching(
    models: Sequence[nn.Module], keep: Sequence[type | str], argument: str
) -> tuple[list[nn.Module], set[int]]:
    """Return the outermost modules that ``keep``, given as ``argument``, matches, and the ids of all in them."""
    unmatched = {pattern for pattern in keep if isinstance(pattern, str)}
    found: dict[int, nn.Module] = {}
    covered: set[int] = set()
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            hits = [k for k in keep if (isinstance(module, k) if isinstance(k, type) else _matches(name, k))]
            unmatched.difference_update(k for k in hits if isinstance(k, str))
            if hits and id(module) not in covered:
                found.update((id(m), m) for m in _with_a_forward(module))
                covered.update(id(m) for m in module.modules())
    if unmatched:
        names = [name for model in models for name, _ in model.named_modules() if name]
        raise PolicyError(
            f"initialize({argument}=...): {', '.join(map(repr, sorted(unmatched)))} matches no module. Names are those "
            f"of model.named_modules(), such as {', '.join(map(repr, names[:5])) or 'none here'}; patterns are globs."
        )
    return [*found.values()], covered


def _with_a_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module``, or its children if it has no forward, as a list of modules has none."""
    if type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _with_a_forward(child)
    else:
        yield module


def _tied_to(kept: Iterable[nn.Module], covered: set[int], models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the other modules that hold a parameter of ``kept``. It stays fp32, so they must run in fp32 too."""
    kept_params = {id(p) for module in kept for p in module.parameters()}
    for module in {id(m): m for model in models for m in model.modules()}.values():
        if id(module) not in covered and any(id(p) in kept_params for p in module._parameters.values()):
            yield module


def _matches(name: str, pattern: str) -> bool:
    return bool(name) and (name == pattern or fnmatch.fnmatchcase(name, pattern))
