"""fp32 master weights: the copies that an optimizer steps where the model's own parameters are fp16 or bf16.

Who owns what: the optimizer's ``param_groups`` and ``state`` hold the masters, the model keeps the lowered parameters,
and this module's weak map leads from one to the other. A master takes over the fp32 storage that the parameter had, so
it is exact. Gradients go from parameter to master on leaving ``scale_loss``, weights come back after a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import StateError
from xamp.ground.pickle_names import pickled_as
from xamp.policy import Policy

__all__ = [
    "GradientWitness",
    "Pair",
    "clear_gradients",
    "copy_back",
    "ensure_master",
    "forget_lowered",
    "is_lowered",
    "load_masters",
    "master_of",
    "overwrite",
    "reconcile",
    "save_masters",
    "set_lowered",
    "transfer",
    "up_to_date",
    "use",
    "watch_state_dicts",
    "write_quietly",
]

Pair = tuple[nn.Parameter, nn.Parameter]
"""(the model's lowered parameter, its fp32 master)."""

LOWER = (torch.float16, torch.bfloat16)

# Each parameter and buffer that xamp lowered -> its master, or None.
_masters: Any = WeakIdKeyDictionary()
# Each master -> its version when it and its parameter were last made to agree.
_agreed: Any = WeakIdKeyDictionary()
# Masters that no backward has used yet: what is written into their parameters still counts.
_unused: Any = WeakIdKeyDictionary()


def master_of(param: torch.Tensor) -> nn.Parameter | None:
    """The fp32 master of a lowered parameter; None where it has none."""
    return _masters.get(param)  # type: ignore[no-any-return]


def is_lowered(tensor: torch.Tensor) -> bool:
    """Whether xamp lowered ``tensor``, in a session that lives."""
    return tensor in _masters


def set_lowered(tensor: torch.Tensor, master: nn.Parameter | None = None) -> None:
    """Note that xamp lowered ``tensor``, and its master if it has one."""
    _masters[tensor] = master
    if master is not None:
        _agreed[master] = master._version
        _unused[master] = True


def forget_lowered(tensor: torch.Tensor) -> None:
    """``tensor`` is plain again."""
    _masters.pop(tensor, None)


def ensure_master(param: nn.Parameter, policy: Policy) -> nn.Parameter | None:
    """The master of ``param``, made now if the policy wants one and there is none; None where it wants none."""
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
    """Move each gradient of a lowered parameter into its master's ``.grad``, adding to what is there.

    It goes in chunks of a sixteenth of the whole, and each chunk's lowered gradients are freed before the next is
    copied: 18 bytes a parameter under Adam where doing all at once takes 20.

    Args:
        pairs: parameters and masters.
        finish: unscales and checks a chunk's fp32 gradients in place; None leaves them as they come.
        leave: the lowered gradients stay where they are.

    Returns:
        Whether there was any gradient.
    """
    moved = False
    for chunk in _chunks([pair for pair in pairs if pair[0].grad is not None]):
        _transfer_chunk(chunk, finish, leave)
        moved = True
    return moved


def _chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    limit = sum(p.numel() for p, _ in pairs) / 16
    start, size = 0, 0
    for end, (param, _) in enumerate(pairs, 1):
        size += param.numel()
        if size >= limit or end == len(pairs):
            yield pairs[start:end]
            start, size = end, 0


def _transfer_chunk(chunk: Sequence[Pair], finish: Callable[[list[torch.Tensor]], None] | None, leave: bool) -> None:
    lowered = [p.grad for p, _ in chunk]
    if any(g is not None and g.is_sparse for g in lowered):
        full = [g.float() for g in lowered if g is not None]
    else:
        full = [torch.empty_like(m) for _, m in chunk]
        torch._foreach_copy_(full, lowered)  # type: ignore[arg-type]
    for param, _ in () if leave else chunk:
        param.grad = None
    if finish is not None:
        finish(full)
    for (_, master), grad in zip(chunk, full, strict=True):
        if master.grad is None:
            master.grad = grad
        else:
            master.grad = master.grad + grad if grad.is_sparse else master.grad.add_(grad)


def copy_back(pairs: Sequence[Pair]) -> None:
    """Write the masters into the model's parameters. Right after a skipped step too: it writes what is there."""
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


def write_quietly(pairs: Iterable[Pair]) -> None:
    """Write masters into parameters between a forward and its backward, which must not take it for a change."""
    for param, master in pairs:
        param.data.copy_(master.detach())  # .data has a version counter of its own


def use(pairs: Sequence[Pair]) -> None:
    """From now on masters are what counts, after they have followed their parameters."""
    reconcile(pairs)
    for _, master in pairs:
        _unused.pop(master, None)


def up_to_date(param: torch.Tensor, master: nn.Parameter) -> nn.Parameter:
    """``master``, which follows ``param`` as long as it is not used."""
    if master in _unused:
        reconcile([(param, master)])  # type: ignore[list-item]
    return master


@torch.no_grad()
def reconcile(pairs: Sequence[Pair]) -> None:
    """Take over what was written since masters were made: into parameters (an initialization, a broadcast) or masters.

    The latter are what ``model.state_dict()`` holds, so writing into that means the model. Else, where the parameter
    still is its master rounded, the master stays exact.
    """
    for param, master in pairs:
        if master._version != _agreed.get(master, master._version):
            write_quietly(((param, master),))
        else:
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        _agreed[master] = master._version


_witnesses: Any = WeakIdKeyDictionary()


class GradientWitness:
    """Tells whether somebody cleared the model's gradients while they were in the masters.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the lowered parameters only. So the
    smallest of them keeps a gradient of zeros: gone means that all were cleared, changed that somebody took the lowered
    parameters' gradients for the real ones.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._param = min((p for p, _ in pairs), key=lambda p: p.numel())
        self._left: tuple[torch.Tensor, int] | None = None
        _witnesses[self._param] = weakref.ref(self)  # which holds the parameter

    def leave(self) -> None:
        """Put the zeros down; called when the gradients have gone to the masters."""
        if self._left is None:
            zeros = torch.zeros_like(self._param)
            self._param.grad = zeros
            self._left = (zeros, zeros._version)

    def holds(self, param: torch.Tensor) -> bool:
        """Whether the gradient of ``param`` is these zeros."""
        return self._left is not None and param is self._param

    def renew(self) -> None:
        """``zero_grad`` of a managed model took the zeros and has cleared the masters that it means."""
        if self._left is not None:
            self._left = None
            self.leave()

    def check(self, call: str) -> None:
        """Drop the masters' gradients if the model's were cleared meanwhile.

        Raises:
            StateError: somebody wrote into the model's gradients.
        """
        if self._left is None:
            return
        zeros, version = self._left
        if self._param.grad is not zeros:
            self._drop()
        elif zeros._version != version:
            raise StateError(
                f"{call}: there are gradients that did not come through scale_loss since the last step: a backward() "
                "ran without it, or the gradients of the model's own parameters were written to. At this level "
                "gradients are in the fp32 masters: clip and change those, with xamp.clip_grad_norm_(optimizer, "
                "max_norm) or xamp.master_params(optimizer), and run every backward() inside the with block."
            )

    def collect(self) -> bool:
        """Before the next backward: take the zeros up again; whether they were still there.

        Zeros that were written to and still are zeros were cleared by ``zero_()``. What a plain backward added stays.
        """
        if self._left is None:
            return False
        zeros, version = self._left
        if self._param.grad is not zeros:
            self._drop()
            return False
        if zeros._version != version:
            self._left = None
            others = (p.grad for p, _ in self._pairs if p is not self._param)
            if not bool(zeros.any()) and all(g is None for g in others):
                self._param.grad = None
                self._drop()
            return False
        self._param.grad = None
        self._left = None
        return True

    def _drop(self) -> None:
        self._left = None
        for _, master in self._pairs:
            master.grad = None


def clear_gradients(model: nn.Module) -> None:
    """Drop the gradients in the masters of ``model``'s parameters."""
    for param in model.parameters() if _masters else ():
        master = _masters.get(param)
        if master is not None:
            master.grad = None
        found = _witnesses.get(param)
        witness = None if found is None else found()
        if witness is not None:
            witness.renew()


def watch_state_dicts(model: nn.Module) -> Callable[[], None]:
    """Make ``state_dict`` of ``model`` and its parts hold fp32 masters, and ``load_state_dict`` write them.

    Returns:
        A function that undoes it.
    """
    handles = []
    for module in model.modules():
        handles.append(module.register_load_state_dict_pre_hook(load_masters))
        module.register_state_dict_post_hook(save_masters)

    held_weakly = weakref.ref(model)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        found = held_weakly()
        for module in () if found is None else found.modules():
            for key in [k for k, hook in module._state_dict_hooks.items() if hook is save_masters]:
                del module._state_dict_hooks[key]

    return undo


@pickled_as("save_masters")
def save_masters(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """State-dict hook: what xamp lowered is saved as its master, else in fp32.

    A copy of the model (an average of its weights) was not lowered by xamp but copied so: its entries stay the very
    tensors of the copy, for whoever writes into them.
    """
    tensors = {**module._parameters, **module._buffers}
    for name, tensor in tensors.items():
        key = prefix + name
        if tensor is None or key not in state or tensor not in _masters:
            continue
        master = _masters[tensor]
        if master is None:
            state[key] = state[key].float()
        else:
            up_to_date(tensor, master)
            state[key] = master if state[key].requires_grad else master.detach()


@pickled_as("load_masters")
@torch.no_grad()
def load_masters(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load-state-dict hook: write the masters of the module's own parameters; torch then writes the parameters."""
    if metadata.get("assign_to_params_buffers"):
        raise StateError(
            "load_state_dict(assign=True) would replace parameters that xamp.initialize has cast and that optimizers "
            "hold. Load without assign=True, or load before xamp.initialize."
        )
    for name, param in module._parameters.items():
        master = None if param is None else master_of(param)
        loaded = state.get(prefix + name)
        if master is None or not isinstance(loaded, torch.Tensor) or loaded.shape != master.shape:
            continue
        loaded = loaded.to(master.device)
        if loaded.dtype in LOWER:  # saved without masters: ours stays where it rounds to what was saved
            loaded = torch.where(master.to(loaded.dtype) == loaded, master, loaded.float())
        overwrite(master, loaded)


@torch.no_grad()
def overwrite(master: torch.Tensor, value: torch.Tensor) -> None:
    """Give ``master`` a loaded value; the caller writes its parameter, or torch is about to."""
    master.copy_(value)
    _agreed[master] = master._version
