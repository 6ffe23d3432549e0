"""A loss scale as scripts access it: ``amp._amp_state.loss_scalers[i]``. The engine keeps the value itself."""

from __future__ import annotations

import weakref

from xamp.apex._engine import ApexEngine

__all__ = ["LossScaler"]


class LossScaler:
    """The scale of one loss: a view of the engine's. It keeps no model and no optimizer alive.

    Attributes:
        index: the ``loss_id``.
        dynamic: whether the scale is dynamic.
    """

    def __init__(self, engine: ApexEngine, index: int) -> None:
        self.index = index
        self.dynamic = engine.policy.dynamic
        self._policy = engine.policy
        self._scaler = engine.scalers[index]
        self._counts = engine.unskipped
        self._engine = weakref.ref(engine)

    def __repr__(self) -> str:
        return f"LossScaler(loss_scale={self.loss_scale()}, dynamic={self.dynamic}, unskipped={self._unskipped})"

    @property
    def engine(self) -> ApexEngine | None:
        """The engine that has the scale; None once models and optimizers are deleted."""
        return self._engine()

    def loss_scale(self) -> float:
        """The value. Waits for the device where the scale is dynamic."""
        return self._loss_scale

    def load(self, scale: float, clean: int) -> None:
        """Set the saved values. From now on, loss scales in the state of an optimizer are ignored."""
        self._unskipped, self._loss_scale = clean, scale
        engine = self.engine
        if engine is not None:
            engine.scales_loaded = True

    @property
    def _loss_scale(self) -> float:
        return float(self._scaler.scale) if self.dynamic else self._scaler.host_scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._scaler.fill(float(scale))

    @property
    def _unskipped(self) -> int:
        return int(self._scaler.growth_tracker) if self.dynamic else self._counts[self.index]

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        if self.dynamic:
            self._scaler.growth_tracker.fill_(int(count))
        else:
            self._counts[self.index] = int(count)

    @property
    def _scale_seq_len(self) -> int:
        return self._policy.growth_interval

    @property
    def _min_loss_scale(self) -> float:
        return self._policy.min_loss_scale

    @property
    def _max_loss_scale(self) -> float:
        return self._policy.max_loss_scale
