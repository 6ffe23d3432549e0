"""``LARC``: scales the gradient of each parameter by the ratio of the norms of parameter and gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

__all__ = ["LARC"]


class LARC:
    """Wraps an optimizer and adapts the learning rate of each parameter (https://arxiv.org/abs/1708.03888).

    Args:
        optimizer: any ``torch.optim`` optimizer.
        trust_coefficient: the adaptive rate is this times the norm of the parameter over that of the gradient.
        clip: the rate is at most that of the optimizer; False: it is multiplied with that of the optimizer.
        eps: added to the norm of the gradient.
    """

    LARC: ClassVar[type[LARC]]

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> Any:
        """The groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    @property
    def defaults(self) -> Any:
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    def state_dict(self) -> Any:
        """Return the state of the wrapped optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients as the wrapped optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients in place, with the decay in them, and step the wrapped optimizer without its decay."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        had_decay = ["weight_decay" in group for group in self.optim.param_groups]
        try:
            with torch.no_grad():
                for group, decay in zip(self.optim.param_groups, decays, strict=True):
                    group["weight_decay"] = 0
                    for param in group["params"]:
                        if param.grad is not None:
                            self._adapt(param, decay, group["lr"])
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay, had in zip(self.optim.param_groups, decays, had_decay, strict=True):
                if had:
                    group["weight_decay"] = decay
                else:
                    group.pop("weight_decay", None)

    def _adapt(self, param: torch.Tensor, decay: float, lr: Any) -> None:
        grad: Any = param.grad
        param_norm, grad_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(grad)
        rate = self.trust_coefficient * param_norm / (grad_norm + param_norm * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1)
        # Where a norm is zero the gradient stays as it is, without its decay. The host does not wait.
        known = (param_norm != 0) & (grad_norm != 0)
        grad.copy_(torch.where(known, (grad + decay * param) * rate, grad))


LARC.LARC = LARC  # in Apex `apex.parallel.LARC` is this module, so that scripts write `apex.parallel.LARC.LARC`
