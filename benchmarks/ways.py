"""The ways to train in mixed precision that :mod:`benchmarks.models` compares: xamp, torch.amp by hand, libraries.

Each way gets a model, its optimizer and its data, and returns a function that does one step and returns the loss. All
run the forward in the lower dtype and the loss in fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import xamp
from benchmarks.nets import Net, Size, loss_of, optimizer_for
from xamp.policy import best_level

Step = Callable[[], Tensor]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass
class Task:
    """What one step works on.

    Attributes:
        dtype: "fp16", which is trained with a dynamic loss scale, or "bf16", without one.
    """

    model: nn.Module
    optimizer: Any
    x: Tensor
    target: Tensor
    device: torch.device
    dtype: str

    @classmethod
    def of(cls, net: Net, size: Size, device: torch.device, dtype: str) -> Task:
        torch.manual_seed(0)
        x, target = net.data(device, *size)
        model = net.make().to(device)
        return cls(model, optimizer_for(net, model), x, target, device, dtype)

    @property
    def level(self) -> str:
        """The level that casts operators to the dtype, and leaves the parameters in fp32."""
        return best_level((str(DTYPES[self.dtype]).removeprefix("torch."),)).name


def ours(task: Task, op_policy: str = "native", level: str | None = None) -> Step:
    """By default with the native op policy: the operators of ``torch.autocast``, as in the other ways."""
    level = level or task.level
    model, optimizer = xamp.initialize(task.model, task.optimizer, level=level, op_policy=op_policy, verbosity=0)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(task.x), task.target)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    return step


def by_hand(task: Task) -> Step:
    """``torch.autocast``, and in fp16 ``torch.amp.GradScaler``, as torch's documentation has them."""
    scaler: Any = torch.amp.GradScaler(task.device.type, enabled=task.dtype == "fp16")
    kind, dtype = task.device.type, DTYPES[task.dtype]

    def step() -> Tensor:
        task.optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            output = task.model(task.x)
        loss = loss_of(output.float(), task.target)
        scaler.scale(loss).backward()
        scaler.step(task.optimizer)
        scaler.update()
        return loss

    return step


def accelerate(task: Task) -> Step:
    library: Any = importlib.import_module("accelerate")
    library.state.AcceleratorState._reset_state(True)  # it keeps one precision for the whole process
    accelerator = library.Accelerator(mixed_precision=task.dtype, cpu=task.device.type == "cpu")
    model, optimizer = accelerator.prepare(task.model, task.optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(task.x), task.target)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return step


def fabric(task: Task) -> Step:
    library: Any = importlib.import_module("lightning.fabric")
    precision = "16-mixed" if task.dtype == "fp16" else "bf16-mixed"
    runs = library.Fabric(accelerator=task.device.type, devices=1, precision=precision)
    model, optimizer = runs.setup(task.model, task.optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(task.x), task.target)
        runs.backward(loss)
        optimizer.step()
        return loss

    return step


def apex(task: Task) -> Step:
    """At O2, against xamp at O2: Apex's O1 replaces functions of torch for the whole process."""
    amp: Any = importlib.import_module("apex.amp")
    model, optimizer = amp.initialize(task.model, task.optimizer, opt_level="O2", verbosity=0)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(task.x).float(), task.target)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    return step


def ours_at_o2(task: Task) -> Step:
    return ours(task, level="O2")


@dataclasses.dataclass(frozen=True)
class Way:
    """What xamp is compared with.

    Attributes:
        theirs: makes their step.
        ours: makes ours for this comparison.
        module: what must be installed.
        dtypes: the dtypes in which it trains on a CPU; on other devices it trains in both, Apex in fp16 alone.
    """

    theirs: Callable[[Task], Step]
    ours: Callable[[Task], Step] = ours
    module: str = "torch"
    dtypes: tuple[str, ...] = ("fp16", "bf16")

    def why_not(self, device: torch.device, dtype: str) -> str:
        """Why this way cannot be measured here; empty: it can."""
        if device.type == "cpu" and dtype not in self.dtypes:
            return f"does not train in {dtype} on a CPU"
        if self.module == "apex.amp" and dtype != "fp16":
            return "trains in fp16 alone"
        try:
            with quiet():
                importlib.import_module(self.module)
        except Exception as error:  # an installed library may fail in any way where the device is not its own
            return "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not import: {error}"
        return ""


WAYS = {
    "torch.amp": Way(by_hand),
    "accelerate": Way(accelerate, module="accelerate", dtypes=("bf16",)),
    "Fabric": Way(fabric, module="lightning.fabric", dtypes=("bf16",)),
    "Apex": Way(apex, ours_at_o2, module="apex.amp", dtypes=()),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No remarks of the libraries: they are about the machine, and stand between the figures."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
