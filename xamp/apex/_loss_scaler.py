"""``apex.amp.scaler.LossScaler``: the loss scale of ``fp16_utils.FP16_Optimizer``, and of scripts that made one.

``xamp.apex.amp`` has a scale of its own, on the device. This one is a number on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex.multi_tensor_apply import multi_tensor_applier

__all__ = ["LossScaler"]


class LossScaler:
    """A static or dynamic loss scale, and the unscaling of gradients with a check for inf and nan.

    Args:
        loss_scale: ``"dynamic"``, or a number.
        init_scale: where a dynamic scale starts.
        scale_factor: a dynamic scale is divided by this on an overflow and multiplied by it to grow.
        scale_window: clean steps after which it grows.
        min_loss_scale: it falls no lower.
        max_loss_scale: it grows no higher, and starts no higher.
    """

    warned_no_fused_kernel = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: Any,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if self.dynamic else loss_scale
        self._max_loss_scale = max_loss_scale
        self._min_loss_scale = min_loss_scale
        self._scale_seq_len = scale_window
        self._scale_factor = scale_factor
        self._unskipped = 0
        self._has_overflow = False
        self._overflow_buf: torch.Tensor | None = None

    def loss_scale(self) -> Any:
        """Return the scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget what the last check found."""
        self._has_overflow = False
        if self._overflow_buf is not None:
            self._overflow_buf.zero_()

    def unscale(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale: Any,
        models_are_masters: bool = False,
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads`` without the scale into ``master_grads``; a dynamic scale looks for inf and nan.

        Args:
            model_grads: what backward left.
            master_grads: as many, to write into; may be the same.
            scale: what the gradients were scaled by.
            models_are_masters: the two lists are the same.
            scale_override: ``(out_scale, in_scale)``: divide by the second and multiply by the first.
        """
        out_scale, in_scale = (1.0, scale) if scale_override is None else scale_override[:2]
        if not model_grads or (models_are_masters and in_scale == 1.0 and not self.dynamic):
            return
        flag = self._flag(model_grads[0].device)
        lists = [list(model_grads), list(master_grads)]
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, lists, out_scale / in_scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads`` without the scale, plus ``stashed_master_grads``, into ``master_grads``.

        Args:
            model_grads: what backward left.
            stashed_master_grads: the gradients of earlier backwards, unscaled.
            master_grads: as many, to write into.
            scale_override: ``(grads_have_scale, stashed_have_scale, out_scale)``.
        """
        have, stashed, out = (self._loss_scale, 1.0, 1.0) if scale_override is None else scale_override
        if not model_grads:
            return
        flag = self._flag(model_grads[0].device)
        lists = [list(model_grads), list(stashed_master_grads), list(master_grads)]
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag, lists, out / have, out / stashed, 0)

    def update_scale(self) -> bool:
        """Move a dynamic scale by what the checks found. Waits for the device.

        Returns:
            Whether the step is to be skipped.
        """
        if self.dynamic and self._overflow_buf is not None:
            self._has_overflow = bool(self._overflow_buf.item())
        if self._has_overflow and self.dynamic:
            floor = self._min_loss_scale or 0.0
            self._loss_scale = max(floor, self._loss_scale / self._scale_factor)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self._unskipped == self._scale_seq_len and self.dynamic:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
            self._unskipped = 0
        return False

    def _flag(self, device: torch.device) -> torch.Tensor:
        if self._overflow_buf is None or self._overflow_buf.device != device:
            raised = self._overflow_buf is not None and bool(self._overflow_buf.item())
            self._overflow_buf = torch.full((1,), int(raised), dtype=torch.int32, device=device)
        return self._overflow_buf
