"""State dicts of models with lowered tensors: hooks save the fp32 masters, and load into them.

Pickles of models carry the hooks, by the names that :func:`~xamp.ground.pickle_names.pickled_as` gives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import StateError
from xamp.ground.pickle_names import pickled_as
from xamp.scaling import masters

__all__ = ["load_masters", "save_masters", "watch_state_dicts"]

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
        if key not in state or not masters.is_lowered(tensor):
            continue
        master = masters.master_of(tensor)
        if master is None:
            state[key] = masters.fp32_of(tensor).clone() if masters.has_fp32(tensor) else state[key].float()
        else:
            masters.up_to_date(tensor, master)
            state[key] = master if state[key].requires_grad else master.detach()


@pickled_as("load_masters")
@torch.no_grad()
def load_masters(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load-state-dict hook: write the masters of the module's own parameters. torch then writes the parameters."""
    if metadata.get("assign_to_params_buffers") and any(masters.is_lowered(t) for _, t in _tensors_of(module, prefix)):
        raise StateError(
            "load_state_dict(assign=True) would replace parameters that xamp.initialize has cast and that optimizers "
            "hold. Load without assign=True, or load before xamp.initialize."
        )
    for key, param in _tensors_of(module, prefix):
        master = masters.master_of(param)
        loaded = state.get(key)
        if isinstance(loaded, torch.Tensor):
            masters.replace_fp32(param, loaded)  # torch writes it rounded
        if master is None or not isinstance(loaded, torch.Tensor) or loaded.shape != master.shape:
            continue
        masters.overwrite(master, masters.unrounded(loaded, master))
