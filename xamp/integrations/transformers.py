"""``Trainer``: Hugging Face's Trainer at any level of xamp.

::

    from xamp.integrations.transformers import Trainer

    trainer = Trainer(model, arguments, train_dataset=data, xamp_settings={"level": "O2"})

``arguments`` has ``fp16=False, bf16=False``. For another Trainer, put the mixin before it:
``class MyTrainer(TrainerMixin, Seq2SeqTrainer)``. Clipping, gradient accumulation, evaluation and checkpoints work as
before. A checkpoint gets one more file, ``xamp.pt``. Logs get the loss scale and the number of skipped steps.

What it cannot do: FSDP, DeepSpeed and Megatron, which bring their own mixed precision; an optimizer that needs a
closure; advance the learning rate only after steps that were applied: schedulers count every step. Gradients of
``model.parameters()`` are not those that are stepped at O2 and O5; ``xamp.master_params`` has them.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from xamp.integrations.accelerate import check_free, drive
from xamp.sessions.foreign import unwrap
from xamp.sessions.initialize import initialize
from xamp.sessions.session import Session, end_session, find_session
from xamp.values.log import is_rank_zero

if TYPE_CHECKING:
    Trainer: Any

__all__ = ["Trainer", "TrainerMixin"]

_FILE = "xamp.pt"


class TrainerMixin:
    """Puts the model and the optimizer of a Trainer under a level; see the module.

    Attributes:
        xamp_settings: the arguments of ``xamp.initialize``, such as ``{"level": "O2"}``.
    """

    model: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, *args: Any, xamp_settings: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.xamp_settings = dict(xamp_settings or {})
        super().__init__(*args, **kwargs)
        check_free(self.accelerator, "Trainer")

    @property
    def xamp_session(self) -> Session | None:
        """The session of the model; None before training."""
        return find_session(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer as the Trainer does, then call ``initialize`` with it, once."""
        base: Any = super()
        made = base.create_optimizer(*args, **kwargs)
        found = self.xamp_session
        if found is not None and found.engine.states and not found.engine.serves(made):
            end_session(found.engine)  # of an earlier Trainer of this model, whose optimizer this one replaces
            found = None
        if found is None or not found.engine.states:
            initialize(unwrap(self.model), made, **self.xamp_settings)
        drive(self.accelerator, [made])
        return made

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with the loss scale and the number of skipped steps beside the training loss."""
        base: Any = super()
        found = self.xamp_session
        if found is not None and "loss" in logs:
            numbers = found.metrics()
            logs = {**logs, "loss_scale": numbers["loss_scale"], "steps_skipped": numbers["steps_skipped"]}
        base.log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        base: Any = super()
        base._save_optimizer_and_scheduler(output_dir)
        found = self.xamp_session
        if found is not None and is_rank_zero():
            torch.save(found.state_dict(), os.path.join(output_dir, _FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        base: Any = super()
        base._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else os.path.join(checkpoint, _FILE)
        found = self.xamp_session
        if found is not None and path is not None and os.path.isfile(path):
            found.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


@functools.cache
def _make() -> type:
    """Make ``Trainer`` on that of transformers."""
    base = importlib.import_module("transformers").Trainer
    return type("Trainer", (TrainerMixin, base), {"__doc__": TrainerMixin.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make()
