"""Recurrent modules: what they call in ``torch._VF`` is lowered, and the check that forbids it is satisfied.

Apex put a shim in the place of ``torch.nn.modules.rnn._VF`` and made one flat buffer of a module's weights by
arithmetic on addresses, which needs cuDNN's layout; and ``nn.RNN`` went by another way than the one that it replaced.
Here the attributes of ``torch._VF`` itself are replaced, and each weight is cast by itself and kept in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xamp.apex._casts import here
from xamp.apex._lists import CELLS, RNNS

__all__ = ["CELLS", "CHECK_INPUT", "RNNS", "check_input_wrapper"]

CHECK_INPUT = "check_input"
"""The kind of wrapper for ``RNNBase.check_input``."""


def check_input_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of ``RNNBase.check_input``, which wants an input of the weights' dtype.

    It is shown an empty tensor of that dtype where both will be cast, so that the shapes are still checked.
    """

    @functools.wraps(original)
    def wrapper(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        casting = here()
        if casting is None or not casting.active:
            return original(self, input, *args, **kwargs)
        given, own = input.dtype, self._flat_weights[0].dtype
        if given is not own and {given, own} == {torch.float32, casting.lower}:
            input = torch.empty(input.shape, dtype=own, device="meta")
        return original(self, input, *args, **kwargs)

    return wrapper
