"""Random numbers from the card's generators. Seed and offset determine them, and can be saved and restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation.crossing import aside
from xamp.backends.npu.emulation.torch_private import OpOverload

__all__ = ["draws", "next_seed", "seeded"]

_MASK = (1 << 64) - 1
_STEP = 4  # how far a kernel moves the offset; any number but 0 works
_global = threading.Lock()


def draws(operator: OpOverload) -> bool:
    """Whether ``operator`` draws random numbers."""
    takes = any("Generator" in str(argument.type) for argument in operator._schema.arguments)
    return takes or torch.Tag.nondeterministic_seeded in operator.tags


def seeded(operator: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` of ``operator``, which then draws from the card's generator."""
    names = [argument.name for argument in operator._schema.arguments]
    if "generator" not in names:
        return _with_global(kernel)
    position = names.index("generator")

    def draw(*args: Any, **kwargs: Any) -> Any:
        own = args[position] if position < len(args) else kwargs.get("generator")
        generator = torch.Generator()
        with aside():
            generator.manual_seed(next_seed(own, (args, kwargs)))
        if position < len(args):
            args = (*args[:position], generator, *args[position + 1 :])
        else:
            kwargs["generator"] = generator
        return kernel(*args, **kwargs)

    return draw


def _with_global(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """For operators without a generator argument: seed the CPU's global generator, which they use, and restore it."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        with _global:
            with aside():
                seed = next_seed(None, (args, kwargs))
                before = torch.default_generator.get_state()
                torch.default_generator.manual_seed(seed)
            try:
                return kernel(*args, **kwargs)
            finally:
                torch.default_generator.set_state(before)

    return draw


def next_seed(generator: torch.Generator | None, values: Any) -> int:
    """A seed made from the generator's state; the state moves on.

    The state is two 64-bit numbers, seed and offset. They are mixed well, because the CPU's generator uses only the
    lower half of its seed.
    """
    if generator is None:
        generator = torch.get_device_module("npu").default_generators[_card(values)]
    elif generator.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}' (emulated)")
    index = generator.device.index
    if index in (None, torch.accelerator.current_device_index()):
        seed, offset = _advance(generator)
    else:  # torch_npu asks the current card for the state, and would make a context there
        with torch.get_device_module("npu").device(index):
            seed, offset = _advance(generator)
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _advance(generator: torch.Generator) -> tuple[int, int]:
    """The generator's seed and offset; the offset moves on."""
    state = generator.get_state()
    numbers = state.view(torch.int64)
    seed, offset = (int(number) for number in numbers.tolist()[:2])
    numbers[1] = offset + _STEP
    generator.set_state(state)
    return seed, offset


def _card(values: Any) -> int:
    """The index of the first card among the arguments, by a tensor or by a ``device``; else the current card."""
    args, kwargs = values
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.get_device() >= 0:
            return value.get_device()
        if isinstance(value, torch.device) and value.index is not None:
            return value.index
    return torch.accelerator.current_device_index()
