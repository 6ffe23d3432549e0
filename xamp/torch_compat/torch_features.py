"""The differences between releases of torch. Each feature stands here once, and is asked of the torch that is there.

The text of a function says what the feature is; ``since`` is the first release that has it, and ``without`` what xamp
does where it is missing. A version is compared only where asking would start the compiler. A test asks every line on
each tested release. The private names of torch that xamp uses have a table of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from xamp.torch_compat.torch_private.modes import disable_current_modes

__all__ = ["FEATURES", "Feature", "missing"]


class Feature(NamedTuple):
    """One difference.

    Attributes:
        name: of the function that asks.
        what: the feature, one sentence.
        since: the first release that has it, such as ``"2.8"``.
        without: what xamp does without it.
        is_there: asks.
    """

    name: str
    what: str
    since: str
    without: str
    is_there: Callable[[], bool]


FEATURES: dict[str, Feature] = {}


def missing() -> list[Feature]:
    """Return the features that this torch lacks."""
    return [feature for feature in FEATURES.values() if not feature.is_there()]


def _since(release: str, *, without: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    def register(ask: Callable[[], bool]) -> Callable[[], bool]:
        answer: list[bool] = []

        @functools.wraps(ask)
        def asked() -> bool:
            if not answer:
                with torch.DisableTorchFunction(), disable_current_modes():  # asked first inside of an exporter, say
                    answer.append(ask())
            return answer[0]

        asked._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces
        FEATURES[ask.__name__] = Feature(ask.__name__, (ask.__doc__ or "").strip(), release, without, asked)
        return asked

    return register


@_since("2.11", without="a weight that one region uses twice is cast twice")
def caches_casts_with_gradients() -> bool:
    """Autocast's cache keeps the gradient of a weight that is used first in a block without gradients."""
    weight = torch.ones(1, 1, dtype=torch.float32, device="cpu", requires_grad=True)
    with torch.inference_mode(mode=False), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


@_since("2.9", without="once a process has run fp8, all autocast casts a weight that one block uses twice twice")
def finds_kernels() -> bool:
    """A kernel of torch can be called after another one has taken its place."""
    return hasattr(torch.library, "get_kernel")


@_since("2.13", without="attributes of a dataclass that are no fields are lost where a compiled model copies it")
def traces_attributes() -> bool:
    """The compiler traces what lists the attributes of an object."""
    return torch.__version__ >= "2.13"


@_since(
    "2.13", without="a container that stands twice in a result is copied twice in one graph; arguments break the graph"
)
def compares_containers() -> bool:
    """The compiler traces whether two containers are one."""
    return torch.__version__ >= "2.13"
