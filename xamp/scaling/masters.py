"""fp32 master weights: the optimizer steps them where the model's own parameters are fp16 or bf16.

The optimizer's ``param_groups`` and ``state`` hold the masters. The model keeps the lowered parameters. A weak map in
this module leads from each lowered parameter to its master. A master takes over the fp32 storage that the parameter
had, so it is exact. Gradients move from parameter to master on leaving ``scale_loss``; weights are copied back after a
step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import StateError
from xamp.ground import kernels
from xamp.ground.compiler import break_graphs
from xamp.ground.pickle_names import pickled_as
from xamp.ground.torch_private.autograd import set_grad_enabled
from xamp.policy import Policy
from xamp.scaling import ranks

__all__ = [
    "Pair",
    "agree",
    "agrees",
    "any_lowered",
    "chunk_limit",
    "copy_back",
    "ensure_master",
    "exact",
    "forget_lowered",
    "fp32_of",
    "has_fp32",
    "is_lowered",
    "load_masters",
    "master_of",
    "overwrite",
    "reconcile",
    "replace_fp32",
    "save_masters",
    "set_lowered",
    "set_lowered_buffer",
    "transfer",
    "transfer_chunk",
    "unrounded",
    "up_to_date",
    "use",
    "watch_state_dicts",
    "write_changed",
    "write_quietly",
]

Pair = tuple[nn.Parameter, nn.Parameter]
"""(the model's lowered parameter, its fp32 master)."""

LOWER = (torch.float16, torch.bfloat16)

# Each parameter and buffer that xamp lowered -> its master, or None.
_masters: Any = WeakIdKeyDictionary()
# Each master -> its version counter when master and parameter were last made equal.
_reconciled_versions: Any = WeakIdKeyDictionary()
# Each lowered buffer -> the fp32 values that were cast or loaded into it.
_originals: Any = WeakIdKeyDictionary()
# Masters that no backward has used yet: they still follow what is written into their parameters.
_unused: Any = WeakIdKeyDictionary()
_SMALL = 2**15
"""Elements, 128 KiB in fp32, below which a chunk of gradients is not worth its calls."""
_copy: Callable[[Any, Any], None] = kernels.copy_  # ranks.copy as soon as a DTensor has a master


def master_of(param: torch.Tensor) -> nn.Parameter | None:
    """Return the fp32 master of a lowered parameter; None where it has none."""
    return _masters.get(param)  # type: ignore[no-any-return]


def is_lowered(tensor: torch.Tensor) -> bool:
    """Return whether xamp lowered ``tensor``, in a session that is not closed."""
    return tensor in _masters


def any_lowered() -> bool:
    """Return whether xamp lowered any tensor, in a session that is not closed."""
    return bool(_masters)


def set_lowered(tensor: torch.Tensor, master: nn.Parameter | None = None) -> None:
    """Note that xamp lowered ``tensor``, and its master if it has one."""
    global _copy
    if ranks.is_dtensor(tensor):
        _copy = ranks.copy
    _masters[tensor] = master
    if master is not None:
        _reconciled_versions[master] = master._version
        _unused[master] = True


def set_lowered_buffer(buffer: torch.Tensor, original: torch.Tensor) -> None:
    """Note that xamp lowered ``original`` to ``buffer``. Its fp32 values count where nothing writes to ``buffer``."""
    _masters[buffer] = None
    _originals[buffer] = original


def fp32_of(buffer: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    """Return the fp32 values of a lowered buffer: the exact ones where it still holds them rounded.

    Where nothing was written that is the tensor that was cast; to find that out waits for the device, which ``wait``
    allows. Values are compared, not versions: a version does not
    show what is written through ``.data``.
    """
    original: torch.Tensor | None = _originals.get(buffer)
    if original is None:
        return buffer.float()
    same = original.to(buffer.device, buffer.dtype) == buffer
    if wait and original.device == buffer.device and bool(same.all()):
        return original
    return torch.where(same, original.to(buffer.device), buffer.float())


def has_fp32(buffer: torch.Tensor) -> bool:
    """Return whether the fp32 values of a lowered buffer are kept; see :func:`set_lowered_buffer`."""
    return buffer in _originals


def unrounded(loaded: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return ``loaded`` in fp32, on the device of ``held``.

    Args:
        loaded: values that are about to be loaded. Where they are 16-bit, saved without masters or taken from the model
            itself, ``held`` stays wherever it rounds to them.
        held: the fp32 values so far, of the same shape.
    """
    loaded = loaded.detach().to(held.device)
    if loaded.dtype not in LOWER:
        return loaded.float()
    return torch.where(held.to(loaded.dtype) == loaded, held, loaded.float())


def replace_fp32(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Make ``values`` the fp32 values of a lowered buffer, before they are written into it; else do nothing."""
    if buffer in _originals and values.shape == buffer.shape:
        _originals[buffer] = unrounded(values, fp32_of(buffer)).clone()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return what ``tensor`` stands for: its master, or its fp32 values; itself where xamp did not lower it."""
    if tensor not in _masters:
        return tensor
    master = _masters[tensor]
    return fp32_of(tensor) if master is None else up_to_date(tensor, master)


def forget_lowered(tensor: torch.Tensor) -> None:
    """Note that ``tensor`` is no longer lowered."""
    _masters.pop(tensor, None)
    _originals.pop(tensor, None)


def ensure_master(param: nn.Parameter, policy: Policy) -> nn.Parameter | None:
    """Return the master of ``param``, and make it if there is none yet; None where the policy wants no master."""
    if not policy.master_weights or param.dtype not in LOWER:
        return None
    found = master_of(param)
    if found is None:
        found = nn.Parameter(param.detach().float())
        set_lowered(param, found)
    return found


def transfer(
    pairs: Sequence[Pair], finish: Callable[[list[torch.Tensor]], None] | None, *, leave: bool = False
) -> bool:
    """Move each gradient of a lowered parameter into its master's ``.grad``, and add it to what is there.

    The function works in chunks of a sixteenth of the whole, but for small ones. It frees the lowered gradients of a
    chunk before it copies the next: Adam then takes 18 bytes a parameter, against 20 if all are copied at once.

    Args:
        pairs: parameters and masters.
        finish: unscales and checks the fp32 gradients of a chunk in place; None leaves them as they are.
        leave: the lowered parameters keep their gradients.

    Returns:
        Whether there was any gradient.
    """
    moved = False
    for chunk in _chunks([pair for pair in pairs if pair[0].grad is not None]):
        transfer_chunk(chunk, finish, leave=leave)
        moved = True
    return moved


def chunk_limit(pairs: Sequence[Pair]) -> float:
    """Return how many elements make a chunk of ``pairs``."""
    return max(sum(p.numel() for p, _ in pairs) / 16, _SMALL)


def _chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    limit = chunk_limit(pairs)
    start, size = 0, 0
    for end, (param, _) in enumerate(pairs, 1):
        size += param.numel()
        if size >= limit or end == len(pairs):
            yield pairs[start:end]
            start, size = end, 0


def transfer_chunk(
    chunk: Sequence[Pair], finish: Callable[[list[torch.Tensor]], None] | None, *, leave: bool = False
) -> None:
    """Move the gradients of one chunk; see :func:`transfer`. Each parameter has one."""
    lowered = [p.grad for p, _ in chunk]
    if any(g is not None and g.is_sparse for g in lowered):
        full = [g.float() for g in lowered if g is not None]
    else:
        full = [torch.empty_like(m) for _, m in chunk]
        if _copy is ranks.copy:
            lowered = [ranks.align(g, m) for g, (_, m) in zip(lowered, chunk, strict=True)]
        _copy(full, lowered)
    for param, _ in () if leave else chunk:
        param.grad = None
    if finish is not None:
        finish(full if _copy is not ranks.copy else [ranks.local(grad) for grad in full])
    for (_, master), grad in zip(chunk, full, strict=True):
        if master.grad is None:
            master.grad = grad
        else:
            master.grad = master.grad + grad if grad.is_sparse else master.grad.add_(grad)


def copy_back(pairs: Sequence[Pair]) -> None:
    """Write the masters into the model's parameters. This is right after a skipped step too: no master has moved."""
    if not pairs:
        return
    before = torch.is_grad_enabled()
    try:  # Ctrl-C at the end of a `with` block would leave it open
        set_grad_enabled(False)
        _copy([p for p, _ in pairs], [m for _, m in pairs])
        set_grad_enabled(before)
    except BaseException:
        set_grad_enabled(before)
        raise


def write_changed(pairs: Iterable[Pair]) -> None:
    """Write masters into parameters, but for those that agree: a load writes both, and what follows it counts."""
    changed = [pair for pair in pairs if _reconciled_versions.get(pair[1]) != pair[1]._version]
    copy_back(changed)
    for _, master in changed:
        _reconciled_versions[master] = master._version


@break_graphs("the model's weights are made those of their masters, which a graph does not let pass unseen by autograd")
def write_quietly(pairs: Iterable[Pair]) -> None:
    """Write masters into parameters without a new version: autograd refuses a parameter changed since its forward."""
    for param, master in pairs:
        ranks.local(param).data.copy_(ranks.local(master.detach()))  # .data has a version counter of its own


def use(pairs: Sequence[Pair]) -> None:
    """Let the masters follow their parameters a last time. From now on the masters hold the weights."""
    reconcile(pairs)
    for _, master in pairs:
        _unused.pop(master, None)


def up_to_date(param: torch.Tensor, master: nn.Parameter) -> nn.Parameter:
    """Return ``master``. As long as no backward has used it, it first follows ``param``."""
    if master in _unused:
        reconcile([(param, master)])  # type: ignore[list-item]
    return master


@torch.no_grad()
def reconcile(pairs: Sequence[Pair]) -> None:
    """Make parameters and masters equal after somebody wrote into one of them.

    A master that was written to goes into its parameter: ``model.state_dict()`` holds the masters, so whoever writes
    into a state dict means the model. Otherwise the master takes over what was written into the parameter (an
    initialization, a broadcast). Where an element of the parameter still is the rounded master, the master keeps its
    exact value.
    """
    for param, master in pairs:
        if master._version != _reconciled_versions.get(master, master._version):
            write_quietly(((param, master),))
        else:
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        _reconciled_versions[master] = master._version


def agrees(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a master to which nothing was written since it was made equal to its parameter."""
    return _reconciled_versions.get(tensor) == tensor._version  # type: ignore[no-any-return]


def agree(agreeing: Iterable[torch.Tensor]) -> None:
    """Note that the masters have the values again that they had in common with their parameters."""
    for master in agreeing:
        _reconciled_versions[master] = master._version


@torch.no_grad()
def overwrite(master: torch.Tensor, value: torch.Tensor) -> None:
    """Write a loaded value into ``master``. The caller, or torch after the hook, writes the parameter."""
    master.copy_(value)
    _reconciled_versions[master] = master._version


# ---------------------------------------------------------------- state dicts of models
#
# Hooks save the masters, and load into them. Pickles of models carry the hooks, by the names of `pickled_as`.

_hooked: Any = WeakIdKeyDictionary()  # modules that have the hooks of watch_state_dicts


def watch_state_dicts(model: nn.Module) -> Callable[[], None]:
    """Add hooks to ``model`` and its parts: ``state_dict`` then holds the masters, ``load_state_dict`` writes them.

    Returns:
        A function that removes the hooks.
    """
    held_weakly = weakref.ref(model)
    handles: list[Any] = []

    def undo() -> None:
        for handle in handles:
            handle.remove()
        found = held_weakly()
        for module in () if found is None else found.modules():
            _hooked.pop(module, None)
            for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]

    try:
        for module in model.modules():
            handles.append(module.register_load_state_dict_pre_hook(load_masters))
            module.register_state_dict_post_hook(save_masters)
            _hooked[module] = True
        return undo
    except BaseException:
        undo()
        raise


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


@pickled_as("save_masters")
def save_masters(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """State-dict hook: save the master of each tensor that xamp lowered, or the tensor in fp32 if it has no master.

    A copy of the model (such as an average of its weights) has fp16 or bf16 tensors that xamp did not lower. Its
    entries stay the tensors of the copy themselves, so that a user can write into them.
    """
    if torch.onnx.is_in_onnx_export():
        return  # the exporter looks for the very tensors with which the model computes
    for key, tensor in _tensors_of(module, prefix):
        if key not in state or not is_lowered(tensor):
            continue
        master = master_of(tensor)
        if master is None:
            state[key] = fp32_of(tensor).clone() if has_fp32(tensor) else state[key].float()
        else:
            up_to_date(tensor, master)
            state[key] = master if state[key].requires_grad else master.detach()


@pickled_as("load_masters")
@torch.no_grad()
def load_masters(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load-state-dict hook: write the masters of the module's own parameters. torch then writes the parameters."""
    if metadata.get("assign_to_params_buffers") and any(is_lowered(t) for _, t in _tensors_of(module, prefix)):
        raise StateError(
            "load_state_dict(assign=True) would replace parameters that xamp.initialize has cast and that optimizers "
            "hold. Load without assign=True, or load before xamp.initialize."
        )
    for key, param in _tensors_of(module, prefix):
        master = master_of(param)
        loaded = state.get(key)
        if isinstance(loaded, torch.Tensor):
            replace_fp32(param, loaded)  # torch writes it rounded
        if master is None or not isinstance(loaded, torch.Tensor) or loaded.shape != master.shape:
            continue
        overwrite(master, unrounded(loaded, master))
