"""fp32 master weights: the optimizer steps them where the model's own parameters are fp16 or bf16.

The optimizer's ``param_groups`` and ``state`` hold the masters, the model keeps the low-precision parameters, and the
weak table of :mod:`xamp.values.lowered` leads from one to the other. A master takes over the fp32 storage that the
parameter had, so it is exact. Weights are copied back after a step; hooks put masters into the model's state dicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.torch_compat import kernels
from xamp.torch_compat.compiler import break_graphs
from xamp.torch_compat.torch_private.autograd import set_grad_enabled
from xamp.values.lowered import (
    LOWER,
    Lowered,
    any_low_precision,
    forget_low_precision,
    handed_out,
    is_low_precision,
    lowered,
    master_of,
)
from xamp.values.own_hooks import keep_from_pickles, pickle_whole

__all__ = [
    "LOWER",
    "Pair",
    "any_low_precision",
    "copy_back",
    "ensure_master",
    "exact",
    "forget_low_precision",
    "fp32_of",
    "has_fp32",
    "is_equal",
    "is_low_precision",
    "is_used",
    "load_masters",
    "make_equal",
    "master_of",
    "overwrite",
    "remember_equal",
    "replace_fp32",
    "save_masters",
    "set_low_precision",
    "start_masters",
    "unrounded",
    "watch_state_dicts",
    "write_changed",
    "write_quietly",
]

Pair = tuple[nn.Parameter, nn.Parameter]
"""(the model's low-precision parameter, its fp32 master)."""


def set_low_precision(
    tensor: torch.Tensor, master: nn.Parameter | None = None, *, original: torch.Tensor | None = None
) -> None:
    """Remember that xamp has cast ``tensor`` to low precision.

    Args:
        tensor: the parameter or buffer, which has its lower dtype.
        master: the master of a parameter, if it has one.
        original: of a buffer: its fp32 values. They count where nothing writes to ``tensor``.
    """
    lowered[tensor] = Lowered(master, original, 0 if master is None else master._version)


def ensure_master(param: nn.Parameter, policy: Policy) -> nn.Parameter | None:
    """Return the master of ``param``, and make it if there is none yet; None where the policy wants no master."""
    if not policy.master_weights or param.dtype not in LOWER:
        return None
    found = master_of(param)
    if found is None:
        found = nn.Parameter(param.detach().float())
        set_low_precision(param, found)
    return found


# ---------------------------------------------------------------- fp32 values


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return what ``tensor`` stands for: its master, or its fp32 values; itself where xamp has not cast it.

    A master that no backward has used yet first follows its parameter.
    """
    found: Lowered | None = lowered.get(tensor)
    if found is None or found.master is None:
        return tensor if found is None else fp32_of(tensor)
    if found.is_unused:
        make_equal([(tensor, found.master)])  # type: ignore[list-item]
    return found.master


def has_fp32(buffer: torch.Tensor) -> bool:
    """Return whether the fp32 values of a low-precision buffer are kept; see :func:`set_low_precision`."""
    return is_low_precision(buffer) and lowered[buffer].original is not None


def fp32_of(buffer: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    """Return the fp32 values of a low-precision buffer: the exact ones where it still holds them rounded.

    Values are compared, because a version does not show what is written through ``.data``. With ``wait`` the host waits
    for the device to learn whether nothing was written; then the result is the tensor that was cast.
    """
    if not has_fp32(buffer):
        return buffer.float()
    original: torch.Tensor = lowered[buffer].original
    same = original.to(buffer.device, buffer.dtype) == buffer
    if wait and original.device == buffer.device and bool(same.all()):
        return original
    return torch.where(same, original.to(buffer.device), buffer.float())


def replace_fp32(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Make ``values`` the fp32 values of a low-precision buffer, before they are written into it; else do nothing."""
    if has_fp32(buffer) and values.shape == buffer.shape:
        lowered[buffer].original = unrounded(values, fp32_of(buffer)).clone()


def unrounded(loaded: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return ``loaded`` in fp32, on the device of ``held``, the fp32 values so far, of the same shape.

    Of 16-bit values, which were saved without masters or come from the model itself, those to which ``held`` rounds
    leave it as it is.
    """
    loaded = loaded.detach().to(held.device)
    if loaded.dtype not in LOWER:
        return loaded.float()
    return torch.where(held.to(loaded.dtype) == loaded, held, loaded.float())


# ---------------------------------------------------------------- parameter and master are made equal


def copy_back(
    pairs: Sequence[Pair], copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = ranks.copy
) -> None:
    """Write the masters into the model's parameters. This is right after a skipped step too: no master has moved.

    ``copy`` copies the second list of tensors into the first; the default takes DTensors too.
    """
    if not pairs:
        return
    before = torch.is_grad_enabled()
    try:  # not `with`, which Ctrl-C at its end would leave open
        set_grad_enabled(False)
        copy([p for p, _ in pairs], [m for _, m in pairs])
        set_grad_enabled(before)
    except BaseException:
        set_grad_enabled(before)
        raise


def write_changed(pairs: Iterable[Pair]) -> None:
    """Write masters into parameters, but not where both are equal: what was written since a load of both counts."""
    changed = [pair for pair in pairs if not is_equal(pair[0])]
    copy_back(changed)
    remember_equal(param for param, _ in changed)


@break_graphs("the model's weights are made those of their masters, which a graph does not let pass unseen by autograd")
def write_quietly(pairs: Iterable[Pair]) -> None:
    """Write masters into parameters without a new version: autograd refuses a parameter changed since its forward."""
    both = [(ranks.local(param).data, ranks.local(master.detach())) for param, master in pairs]
    if both:  # .data has a version counter of its own
        kernels.copy_([param for param, _ in both], [master for _, master in both])


def is_equal(param: torch.Tensor) -> bool:
    """Return whether ``param`` has a master to which nothing was written since both were made equal."""
    found: Lowered | None = lowered.get(param)
    return found is not None and found.master is not None and found.version == found.master._version


def remember_equal(params: Iterable[torch.Tensor]) -> None:
    """Remember that ``params`` and their masters are equal now."""
    for param in params:
        found: Lowered | None = lowered.get(param)
        if found is not None and found.master is not None:
            found.version = found.master._version


def is_used(param: torch.Tensor) -> bool:
    """Return whether a backward has used the master of ``param``, which then holds the weights."""
    return param in lowered and not lowered[param].is_unused


def start_masters(pairs: Sequence[Pair]) -> None:
    """Let the masters follow their parameters a last time. From now on the masters hold the weights."""
    make_equal(pairs)
    for param, _ in pairs:
        if (found := lowered.get(param)) is not None:  # else its session was closed
            found.is_unused = False


@torch.no_grad()
def make_equal(pairs: Sequence[Pair]) -> None:
    """Make parameters and masters equal after somebody wrote into one of them.

    A master that was written to goes into its parameter: ``model.state_dict()`` holds the masters, so whoever writes
    into a state dict means the model. Otherwise the master takes over what was written into the parameter (an
    initialization, a broadcast), and keeps its exact value wherever the parameter still is that value rounded.
    """
    for param, master in pairs:
        if is_equal(param):
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        else:
            write_quietly(((param, master),))
        remember_equal([param])


@torch.no_grad()
def overwrite(param: torch.Tensor, value: torch.Tensor) -> None:
    """Write a loaded value into the master of ``param``. The caller, or torch after the hook, writes the parameter."""
    master: torch.Tensor = lowered[param].master
    master.copy_(value)
    remember_equal([param])


# ---------------------------------------------------------------- state dicts of models
#
# Hooks save the masters, and load into them. Pickles and copies of models come without them.

_hooked: Any = WeakIdKeyDictionary()  # modules that have the hooks of watch_state_dicts


def watch_state_dicts(model: nn.Module) -> Callable[[], None]:
    """Add hooks to ``model`` and its parts: ``state_dict`` then holds the masters, ``load_state_dict`` writes them.

    Returns:
        A function that removes the hooks.
    """
    held_weakly = weakref.ref(model)

    def undo() -> None:
        found = held_weakly()
        for module in () if found is None else found.modules():
            _hooked.pop(module, None)
            for hooks in _hooks_of(module):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]
                pickle_whole(hooks)

    try:
        for module in model.modules():
            module.register_load_state_dict_pre_hook(load_masters)
            module.register_state_dict_post_hook(save_masters)
            for hooks in _hooks_of(module):
                keep_from_pickles(hooks, _is_ours)
            _hooked[module] = True
        return undo
    except BaseException:
        undo()
        raise


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._state_dict_hooks, module._load_state_dict_pre_hooks


def _is_ours(hook: Any) -> bool:
    """Return whether a state-dict hook of a module, which torch may have wrapped, is one of this file."""
    return getattr(hook, "hook", hook) in (load_masters, save_masters)


def _tensors_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key and the tensor of each parameter and persistent buffer of ``module``.

    A child that came later (a new head, a parametrization) has no hooks: its tensors are those of ``module`` too.
    """
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None and child not in _hooked:
            yield from _tensors_of(child, f"{prefix}{name}.")


def save_masters(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """State-dict hook: save the master of each tensor that xamp has cast, or the tensor in fp32 if it has no master.

    A copy of the model (such as an average of its weights) has fp16 or bf16 tensors that xamp has not cast. Its
    entries stay the tensors of the copy themselves, so that a user can write into them.
    """
    if torch.onnx.is_in_onnx_export():
        return  # the exporter looks for the very tensors with which the model computes
    from xamp.scaling import handed_out as copies  # a training need not load it

    for key, tensor in _tensors_of(module, prefix):
        if key not in state or not is_low_precision(tensor):
            continue
        master = master_of(tensor)
        if master is None:
            copies.begin_saving(state)
            with torch.inference_mode(False):
                state[key] = fp32_of(tensor).clone() if has_fp32(tensor) else state[key].float()
            copies.hand_out(key, tensor, state[key], write_exact)
        else:
            state[key] = exact(tensor) if state[key].requires_grad else exact(tensor).detach()


@torch.no_grad()
def write_exact(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write fp32 values into a low-precision tensor without a master."""
    replace_fp32(tensor, values)
    tensor.copy_(values)


@torch.no_grad()
def load_masters(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load-state-dict hook: write the masters of the module's own parameters. torch then writes the parameters."""
    if metadata.get("assign_to_params_buffers") and any(is_low_precision(t) for _, t in _tensors_of(module, prefix)):
        raise StateError(
            "load_state_dict(assign=True) would replace parameters that xamp.initialize has cast and that optimizers "
            "hold. Load without assign=True, or load before xamp.initialize."
        )
    for key, param in _tensors_of(module, prefix):
        master, loaded = master_of(param), state.get(key)
        if isinstance(loaded, torch.Tensor):
            if handed_out:
                from xamp.scaling.handed_out import forget

                forget(param)
            replace_fp32(param, loaded)  # torch writes it rounded
            if master is not None and loaded.shape == master.shape:
                overwrite(param, unrounded(loaded, master))
