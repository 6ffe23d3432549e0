"""Lets a model follow its masters where something other than a step changed them: before each of its forwards.

Versions of tensors tell of a change, and compiled code cannot read them. So what asks for them stays out of the graph
wherever the model's forward is the outermost function that is compiled: ``torch.compile(model)``, ``model.compile()``;
:func:`xamp.casting.region.in_region` sees to that. Where the forward is a part of another function's graph,
:data:`graphs` says whether these graphs break before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.torch_compat.compiler import break_graphs, keep_eager

__all__ = ["begin_mode", "catch_up", "catch_up_in_graph", "graphs", "refresh_graphs", "register"]


class Graphs:
    """The graphs of other functions that a forward of a model with masters is a part of.

    Attributes:
        exist: there are such graphs, so that not each forward asks whether a master has changed.
        ask: they break before such a forward, to let all models follow. They are guarded on this.
    """

    exist = False
    ask = False


graphs = Graphs()

_followers: Any = WeakIdKeyDictionary()  # model -> its functions, in this order; see follow
_WRITE, _MAY_BE_BEHIND, _WRITE_AFRESH = 0, 1, 2


def register(
    model: nn.Module, write: Callable[[], None], may_be_behind: Callable[[], bool], write_afresh: Callable[[], None]
) -> None:
    """Let ``model`` follow its masters before each forward, and where its mode changes.

    Args:
        model: the model.
        write: writes the masters that changed since the last step into the model. A method, held weakly.
        may_be_behind: whether compiled code may have changed masters, or changes come where nothing tells of them. A
            method of the same object.
        write_afresh: writes all masters into the model. A method of the same object.
    """
    _followers[model] = tuple(map(weakref.WeakMethod, (write, may_be_behind, write_afresh)))
    refresh_graphs()  # another one may have gone, with what made graphs ask


@keep_eager
def catch_up(model: nn.Module) -> None:
    """Write the masters that changed since the last step into ``model``."""
    _call(model, _WRITE)


@keep_eager
def begin_mode(model: nn.Module) -> None:
    """Write all masters into ``model``, whose mode has changed: it may be about to evaluate."""
    _call(model, _WRITE_AFRESH)


def _call(model: nn.Module, which: int) -> None:
    found = _followers.get(model)
    write = None if found is None else found[which]()
    if write is not None:
        write()


def catch_up_in_graph() -> None:
    """Let all models follow their masters, in the graph of another function that a forward is a part of, if it asks."""
    ask = graphs.ask  # read first: the next line may change it, and the graph is guarded on what was read
    _all_catch_up_once()
    if ask:
        _all_catch_up()


@keep_eager
def refresh_graphs() -> None:
    """Set :attr:`Graphs.ask` anew. Called where the answer of a ``may_be_behind`` may have changed."""
    graphs.ask = any(may_be_behind() for may_be_behind in _alive(_MAY_BE_BEHIND))


def _alive(which: int) -> list[Callable[[], Any]]:
    return [method for found in list(_followers.values()) if (method := found[which]()) is not None]


@break_graphs(
    "something other than optimizer.step() has written into the fp32 masters, and the model follows them here"
)
def _all_catch_up() -> None:
    for write in _alive(_WRITE):
        write()


def _all_catch_up_once() -> None:
    """Let models follow what was written before the graph existed. The compiler runs this while it traces."""
    graphs.exist = True
    _all_catch_up()


_all_catch_up_once._dynamo_marked_constant = True  # type: ignore[attr-defined]
