"""Pickles of what xamp has cast to low precision: fp32, as state dicts have it.

A whole model in a file (``torch.save(model)``), or sent to another process, is the plain model of its own class.
Modules and optimizers see to their classes; here tensors are seen to, wherever they are found: in the lists of a
recurrent layer, of DDP and of an optimizer too. So what is one parameter in the session is one in the pickle.

Python asks its tables of reducers before the tensor. ``copy.deepcopy`` does not come here, for a tensor copies itself;
``copy.copy`` of a single tensor does.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.scaling import masters
from xamp.values.lowered import is_copied, is_low_precision

__all__ = ["serve_pickles"]

_PROTOCOL = 2  # torch's tensors reduce to the same at each
_SHARING = (torch.Tensor, nn.Parameter)  # what torch sends to another process as a handle of its memory

_sent: Any = WeakIdKeyDictionary()  # tensor -> the values that were sent in its place, which must outlive the transfer


def serve_pickles(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors of the classes that ``tensors`` have be pickled in fp32 where xamp has cast them. Done once."""
    for kind in {*_SHARING, *map(type, tensors)}:
        if kind not in copyreg.dispatch_table:
            copyreg.pickle(kind, _reduced)
    for kind in _SHARING:
        ForkingPickler.register(kind, _shared)


def _reduced(tensor: torch.Tensor) -> Any:
    made = _in_fp32(tensor)
    if made is not tensor and type(tensor) not in _SHARING:
        _sent[tensor] = made
    return made.__reduce_ex__(_PROTOCOL)


def _shared(tensor: torch.Tensor) -> Any:
    made = _in_fp32(tensor)
    if made is not tensor:
        _sent[tensor] = made
    return reduce_tensor(made)


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same class, with the same attributes, that has the exact fp32 values of ``tensor``.

    Returns ``tensor`` itself where xamp has not cast it, nor what it was copied from.
    """
    if not (is_low_precision(tensor) or is_copied(tensor)):
        return tensor
    exact = masters.exact(tensor).detach().float()
    made = exact
    if isinstance(tensor, nn.Parameter):
        is_parameter = type(tensor) is nn.Parameter or ranks.is_dtensor(tensor)
        made = nn.Parameter(exact) if is_parameter else exact.as_subclass(type(tensor))
        made.requires_grad = tensor.requires_grad
    made.__dict__.update(tensor.__dict__)
    return made
