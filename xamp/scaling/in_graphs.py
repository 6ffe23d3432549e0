"""An operator by which compiled code asks the host something while it runs, where Python would break the graph."""

from __future__ import annotations

import torch

from xamp.errors import StateError
from xamp.ground.compiler import break_graphs
from xamp.ground.torch_features import has_operators_outside_of_captures

__all__ = ["check_unwritten", "is_written", "refuse_written"]

_SCHEMA = "(Tensor(a!) asked, Tensor tensor, int version, str call) -> ()"
_made: list[object] = []


def refuse_written(call: str) -> StateError:
    """Return the error of ``call`` where somebody wrote into the gradients of lowered parameters."""
    return StateError(
        f"{call}: there are gradients that did not come through scale_loss since the last step: a backward() "
        "ran without it, or the gradients of the model's own parameters were written to. At this level "
        "gradients are in the fp32 masters: clip and change those, with xamp.clip_grad_norm_(optimizer, "
        "max_norm) or xamp.master_params(optimizer), and run every backward() inside the with block."
    )


def is_written(tensor: torch.Tensor, version: int) -> bool:
    """Return whether somebody wrote into ``tensor`` since it had ``version``."""
    return tensor._version != version


def _make() -> None:
    """Register the operator, at the first trace that calls it."""
    if _made:
        return

    def check(asked: torch.Tensor, tensor: torch.Tensor, version: int, call: str) -> None:
        del asked  # see check_unwritten
        if is_written(tensor, version):
            raise refuse_written(call)

    made = torch.library.custom_op(
        "xamp::check_unwritten", check, mutates_args=("asked",), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,)
    )
    made.register_fake(lambda *_: None)
    _made.append(made)


_make._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces


def check_unwritten(asked: torch.Tensor, tensor: torch.Tensor, version: int, call: str) -> None:
    """Raise where somebody wrote into ``tensor`` since it had ``version``; for code that is being compiled.

    Args:
        asked: any tensor that is of no other use. The operator says that it writes there, so that no compiler takes it
            for one without effect.
        tensor: the tensor.
        version: its version.
        call: for the message.

    Raises:
        StateError: somebody wrote into it.
    """
    if has_operators_outside_of_captures():
        _make()
        torch.ops.xamp.check_unwritten(asked, tensor, version, call)
    else:
        _check_outside(tensor, version, call)


@break_graphs("an operator of this torch cannot say that no CUDA graph may hold it")
def _check_outside(tensor: torch.Tensor, version: int, call: str) -> None:
    if is_written(tensor, version):
        raise refuse_written(call)
