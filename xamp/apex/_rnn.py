"""Recurrent modules: wraps ``RNNBase.check_input``, which would refuse the lowered calls of recurrent modules.

Apex replaced ``torch.nn.modules.rnn._VF`` by a shim. It packed the weights of a module into one flat buffer by
arithmetic on addresses, which needs cuDNN's layout. Its shim missed ``nn.RNN``, which takes another path. xamp replaces
the attributes of ``torch._VF`` itself, and casts and caches each weight separately.
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
    """Make the wrapper that replaces ``RNNBase.check_input``, which requires an input of the weights' dtype.

    If the input and the weights will both be cast, the wrapper passes an empty tensor of that dtype. So the original
    still checks the shapes.
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
