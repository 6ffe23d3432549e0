"""NVIDIA's Apex to the letter of its lists, on whatever backend serves the model's device.

At O1 and O4 functions are cast as Apex cast them (:mod:`xamp.apex._regions`), in the regions of the session and nowhere
else. All else is the other backend's.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from xamp.contract import Backend, BackendSpec, Capabilities

if TYPE_CHECKING:
    from xamp.policy import Policy

__all__ = ["ApexBackend"]


class ApexBackend(Backend):
    """Op policy ``"apex"`` on a device whose backend is lent.

    Args:
        spec: its own.
        lender: the backend of the device.
    """

    op_policy = "apex"

    def __init__(self, spec: BackendSpec, lender: Backend) -> None:
        super().__init__(spec)
        self.lender = lender
        for name, found in vars(Backend).items():
            if inspect.isfunction(found) and not name.startswith("_") and name not in vars(ApexBackend):
                setattr(self, name, getattr(lender, name))

    @property
    def device_type(self) -> str:
        """See :attr:`xamp.contract.Backend.device_type`."""
        return self.lender.device_type

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        """The lender's, with this op policy alone; and there may be a real Apex."""
        return dataclasses.replace(self.lender.capabilities(device), op_policies=(self.op_policy,), delegates=True)

    def hand_over(self, policy: Policy, device: torch.device, arguments: Any) -> Any:
        """See :meth:`xamp.contract.Backend.hand_over`: to the real ``apex.amp``."""
        from xamp.apex._delegate import hand_over

        return hand_over(policy, self, device, arguments)
