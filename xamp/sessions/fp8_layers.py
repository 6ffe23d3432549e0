"""Linear layers in fp8: by which recipe, which layers, and why not the others. Loaded only where fp8 is asked for.

:func:`choose` looks at each linear layer of the models once; what it
finds is what ``xamp.session(model).fp8`` and the log of ``initialize`` say. Layers that stay out get a region of their
own, in which products are in bf16.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from xamp.casting import fp8_regions
from xamp.contract import Backend
from xamp.distributed.fsdp import sharded_params
from xamp.distributed.ranks import is_dtensor, is_running
from xamp.policy import Policy
from xamp.registry.fp8_widths import gains_from
from xamp.sessions.lowering import find_fp32_modules, matching
from xamp.values.log import say
from xamp.values.recipes import RECIPES

__all__ = ["Choice", "Fp8Layer", "choose", "chosen_by", "layers_of", "tell", "tell_of_another", "told", "with_recipe"]


_MANY = 4  # so many names that differ in numbers only are told as one


class Fp8Layer(NamedTuple):
    """What became of one linear layer.

    Attributes:
        name: its name in the model; in the second model of a call, and further ones, ``models[1].name``.
        shape: (outputs, inputs).
        in_fp8: whether its products run in fp8.
        why: the reason, a few words.
    """

    name: str
    shape: tuple[int, int]
    in_fp8: bool
    why: str


class Choice(NamedTuple):
    """What :func:`choose` found: all layers, and the modules that get a region without fp8."""

    layers: tuple[Fp8Layer, ...]
    modules: list[nn.Module]

    def prepare(self, engine: Any) -> None:
        """Make the device of ``engine`` run such regions, and remember what became of the layers."""
        fp8_regions.install(engine.device.type, engine.backend)
        _layers[engine] = self.layers


def with_recipe(policy: Policy, backend: Backend, device: torch.device) -> Policy:
    """Return ``policy`` with a recipe that ``device`` has, and, for the default choice, the width from which it gains.

    The ranks of a job have one width for a recipe: that of the first which comes here.

    Raises:
        UnsupportedPolicy: the device has no recipe, or not this one.
    """
    recipe = fp8_regions.available(policy.fp8 or "", backend, device)
    width = None
    if policy.keep_bf16 is None:
        width = gains_from(recipe, device)
        if is_running():
            from xamp.distributed.rank_settings import first_word

            width = float(first_word(f"fp8/{recipe}", str(width)))
    return dataclasses.replace(policy, fp8=recipe, fp8_gains_from=width)


def choose(models: Sequence[nn.Module], policy: Policy) -> Choice:
    """Decide for each linear layer of ``models`` whether its products run in fp8 under ``policy``.

    Raises:
        PolicyError: ``keep_bf16`` names a module that no model has.
    """
    in_fp32 = _parts_of(find_fp32_modules(models, policy.keep_fp32))
    named, in_bf16 = matching(models, policy.keep_bf16 or (), "keep_bf16")
    found = [
        (f"models[{index}].{name}" if index else name, module, shapes)
        for index, model in enumerate(models)
        for name, module, shapes in _linear_layers(model)
    ]
    gathered = {id(param) for param in sharded_params(part for model in models for part in model.modules())}
    rest = _Defaults(models, policy, [module for _, module, _ in found]) if policy.keep_bf16 is None else None
    layers, apart = [], [module for module in named if id(module) not in in_fp32]
    for name, module, shapes in found:
        if id(module) in in_fp32:
            why = "keep_fp32 names it"
        elif id(module) in in_bf16:
            why = "keep_bf16 names it"
        elif isinstance(module, nn.MultiheadAttention) and id(module.out_proj) in in_bf16:
            why = "keep_bf16 names its out_proj"  # which is never called: the attention multiplies by its weight
            apart.append(module)
        else:
            why = _impossible(module, shapes, policy, gathered)
            if not why and rest is not None:
                why = rest.why_not(module, shapes)
            apart += [module] if why else []
        layers.append(Fp8Layer(name, shapes[0], not why, why or RECIPES[policy.fp8 or ""].said))
    return Choice(tuple(layers), apart)


def _parts_of(modules: Iterable[nn.Module]) -> set[int]:
    return {id(part) for module in modules for part in module.modules()}


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any, list[tuple[int, int]]]]:
    """Yield each linear layer of ``model`` with its name and the shapes (outputs, inputs) of its weights."""
    attention: set[int] = set()
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):  # calls no module for its products
            attention.add(id(module.out_proj))
            found = {module.embed_dim, module.kdim, module.vdim}
            yield name, module, [(module.embed_dim, each) for each in sorted(found, reverse=True)]
        elif isinstance(module, nn.Linear) and id(module) not in attention:
            yield name, module, [(module.out_features, module.in_features)]  # the weight may be a shard, and flat
        elif is_turned(module):
            inputs, outputs = module.weight.shape
            yield name, module, [(outputs, inputs)]


def is_turned(module: Any) -> bool:
    """Tell a linear layer whose weight is (inputs, outputs), as GPT-2's in transformers."""
    return type(module).__name__ == "Conv1D" and bool(getattr(getattr(module, "weight", None), "ndim", 0) == 2)


def _impossible(module: nn.Module, shapes: Sequence[tuple[int, int]], policy: Policy, gathered: Collection[int]) -> str:
    """Return why a layer cannot run in fp8, if it cannot; ``gathered``: ids of parameters that FSDP makes whole."""
    multiple = RECIPES[policy.fp8 or ""].multiple
    if type(module).__module__.partition(".")[0] == "torchao":
        return "torchao runs it"
    if any(size % multiple for size in itertools.chain(*shapes)):
        return f"its dimensions are no multiples of {multiple}"
    if any(is_dtensor(param) and id(param) not in gathered for param in module.parameters()):
        return "tensor parallelism has split its weight"
    return ""


class _Defaults:
    """Which layers stay in bf16 where ``keep_bf16`` does not say."""

    def __init__(self, models: Sequence[nn.Module], policy: Policy, layers: Sequence[nn.Module]) -> None:
        parts = (part for model in models for part in model.modules())
        self._tied = {id(part.weight) for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
        self._last = id(layers[-1]) if layers else 0
        self._width = policy.fp8_gains_from or 0.0

    def why_not(self, module: nn.Module, shapes: Sequence[tuple[int, int]]) -> str:
        """Return why a layer is left out, if it is."""
        if id(getattr(module, "weight", None)) in self._tied:
            return "its weight is an embedding's"
        if id(module) == self._last:
            return "it is the last one"
        if all(outputs * inputs < self._width**2 for outputs, inputs in shapes):
            if self._width == math.inf:
                return "no width gained where xamp doctor --fp8 measured"
            return f"too small to gain: below {self._width:g} x {self._width:g}"
        return ""


# --- what is told


def tell(engine: Any, given: Iterable[nn.Module]) -> None:
    """Log which layers of a session run in fp8, and what to expect of it on this device.

    Args:
        engine: that of the session.
        given: the models as ``initialize`` got them: one that is compiled comes in a wrapper, or has a compiled call.
    """
    policy, layers = engine.policy, layers_of(engine)
    found = any(layer.in_fp8 for layer in layers)
    said = told(policy, layers)
    cure = "" if found else ". So nothing is gained: keep_bf16=() takes every layer that can be multiplied"
    say("%s%s", said, cure, level=logging.INFO if found else logging.WARNING)
    if policy.fp8 not in engine.backend.capabilities(engine.device).fp8:
        say("fp8 on %s is a rehearsal: the same values, and slower than bf16", engine.device)
    elif all(getattr(m, "_orig_mod", None) is getattr(m, "_compiled_call_impl", None) is None for m in given):
        say("fp8 on %s is faster with torch.compile only: casts that run one by one take longer", engine.device)


def told(policy: Policy, layers: Sequence[Fp8Layer]) -> str:
    """Return in a line which layers run in fp8, and which do not for which reason."""
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        by_reason.setdefault("" if layer.in_fp8 else layer.why, []).append(layer.name or "the model itself")
    inside = by_reason.pop("", [])
    out = [f"{_names(names)} ({why})" for why, names in by_reason.items()]
    said = f"{len(inside)} of {len(layers)} linear layers run in fp8, {policy.fp8}: {_names(inside) or 'none'}"
    return f"{said}; not in fp8: {', '.join(out)}" if out else said


def chosen_by(policy: Policy) -> str:
    """Return by which recipe layers run in fp8, and by which width they were chosen where no argument says them."""
    width = policy.fp8_gains_from
    return f"{policy.fp8}" if width is None else f"{policy.fp8} from a width of {width:g}"


def tell_of_another(saved: str, policy: Policy) -> None:
    """Warn where a checkpoint says another choice of layers than ``policy`` makes."""
    if saved != chosen_by(policy):
        say(
            "load_state_dict: the run that saved this had fp8 as %s, and this session has %s: other layers may be in 8 "
            "bits now. Widths are those of xamp doctor --fp8; keep_bf16= fixes which layers stay in bf16",
            *(saved, chosen_by(policy)),
            level=logging.WARNING,
        )


def _names(names: Iterable[str]) -> str:
    """List names; those that differ in numbers only are one, with a star for the number and how many there are."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<![^.\[])\d+(?![^.\]])", "*", name), []).append(name)
    return ", ".join(", ".join(same) if len(same) < _MANY else f"{star} ({len(same)})" for star, same in alike.items())


_layers: weakref.WeakKeyDictionary[Any, tuple[Fp8Layer, ...]] = weakref.WeakKeyDictionary()


def layers_of(engine: Any) -> tuple[Fp8Layer, ...]:
    """Return what became of the linear layers of a session, by its engine."""
    return _layers.get(engine, ())
