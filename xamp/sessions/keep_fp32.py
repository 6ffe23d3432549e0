"""Which modules ``initialize(keep_fp32=...)`` means: those that run in fp32 while the others are lowered."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from xamp.errors import PolicyError

__all__ = ["find_fp32_modules"]


def find_fp32_modules(models: Sequence[nn.Module], keep: Sequence[type | str]) -> list[nn.Module]:
    """Return the modules to run in fp32: the outermost that ``keep`` matches, and those with a parameter of theirs."""
    unmatched = {pattern for pattern in keep if isinstance(pattern, str)}
    found: dict[int, nn.Module] = {}
    covered: set[int] = set()
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            hits = [k for k in keep if (isinstance(module, k) if isinstance(k, type) else _matches(name, k))]
            unmatched.difference_update(k for k in hits if isinstance(k, str))
            if hits and id(module) not in covered:
                found.update((id(m), m) for m in _with_a_forward(module))
                covered.update(id(m) for m in module.modules())
    if unmatched:
        names = [name for model in models for name, _ in model.named_modules() if name]
        raise PolicyError(
            f"initialize(keep_fp32=...): {', '.join(map(repr, sorted(unmatched)))} matches no module. Names are those "
            f"of model.named_modules(), such as {', '.join(map(repr, names[:5])) or 'none here'}; patterns are globs."
        )
    return [*found.values(), *_tied_to(found.values(), covered, models)]


def _with_a_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module``, or its children if it has no forward, as a list of modules has none."""
    if type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _with_a_forward(child)
    else:
        yield module


def _tied_to(kept: Iterable[nn.Module], covered: set[int], models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the other modules that hold a parameter of ``kept``. It stays fp32, so they must run in fp32 too."""
    kept_params = {id(p) for module in kept for p in module.parameters()}
    for module in {id(m): m for model in models for m in model.modules()}.values():
        if id(module) not in covered and any(id(p) in kept_params for p in module._parameters.values()):
            yield module


def _matches(name: str, pattern: str) -> bool:
    return bool(name) and (name == pattern or fnmatch.fnmatchcase(name, pattern))
