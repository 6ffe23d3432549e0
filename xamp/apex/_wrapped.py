"""What the wrappers of Apex show of the optimizer in them."""

from __future__ import annotations

from typing import Any

__all__ = ["ShowsInner"]


class ShowsInner:
    """Passes ``state`` and ``param_groups`` on to :attr:`optimizer`.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    optimizer: Any

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The groups of the wrapped optimizer, with the masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value
