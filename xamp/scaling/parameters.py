"""What one optimizer steps: its parameters, sorted by whether they have masters. Read again when its groups change."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xamp.distributed import ranks
from xamp.scaling import unscale
from xamp.scaling.masters import Pair
from xamp.torch_compat import kernels

__all__ = ["Parameters", "any_has_gradient"]

_params_of, _grad_of = operator.itemgetter("params"), operator.attrgetter("grad")


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of one optimizer.

    Attributes:
        in_groups: what the groups held when they were read, in their order.
        without_master: parameters that the optimizer steps directly, because they have no master.
        pairs: low-precision parameters and the masters that the optimizer steps in their place.
        stepped: all tensors that the optimizer steps: ``without_master`` and the masters.
        masters, low_precision: those of ``pairs``.
        of_the_models: the parameters as models and wrappers know them: ``without_master`` and the low-precision ones.
        in_parts: some of ``without_master`` are DTensors, or local tensors of such, so this rank has parts of them.
        of_one_kind: one ``_foreach`` call takes all gradients of ``stepped``.
        in_fp32: all of ``without_master`` are.
        copy: copies the second list of tensors, such as masters, into the first, such as their parameters.
    """

    in_groups: Sequence[nn.Parameter] = ()
    without_master: Sequence[torch.Tensor] = ()
    pairs: Sequence[Pair] = ()
    stepped: Sequence[torch.Tensor] = ()
    masters: Sequence[torch.Tensor] = ()
    low_precision: Sequence[torch.Tensor] = ()
    of_the_models: Sequence[torch.Tensor] = ()
    in_parts: bool = False
    of_one_kind: bool = True
    in_fp32: bool = True
    copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = kernels.copy_

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]], pairs: Iterable[Pair]) -> Parameters:
        """Sort the parameters in an optimizer's ``groups`` into direct ones and masters of ``pairs``."""
        param_of = {id(m): p for p, m in pairs}
        in_groups = _all_in(groups)
        others = [param for param in in_groups if id(param) not in param_of]
        own = [(param_of[id(param)], param) for param in in_groups if id(param) in param_of]
        low_precision, masters = [p for p, _ in own], [m for _, m in own]
        stepped = [*others, *masters]
        return cls(
            in_groups,
            others,
            own,
            stepped,
            masters,
            low_precision,
            [*others, *low_precision],
            in_parts=any(map(ranks.is_part, others)),
            of_one_kind=len(set(map(unscale.kind, stepped))) <= 1,
            in_fp32=all(p.dtype == torch.float32 for p in others),
            copy=ranks.copy if any(ranks.is_dtensor(p) for p, _ in own) else kernels.copy_,
        )

    def has_other_count(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether ``groups`` hold more parameters, or fewer, than when they were read."""
        return sum(map(len, map(_params_of, groups))) != len(self.in_groups)

    def not_held(self, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter] | None:
        """Return the parameters in ``groups`` that were not there when they were read.

        None where the groups hold what they held, in the same order. To find that out costs 8 us for 300 parameters.
        """
        now = groups[0]["params"] if len(groups) == 1 else _all_in(groups)
        if len(now) == len(self.in_groups) and all(map(operator.is_, now, self.in_groups)):
            return None
        known = set(map(id, self.in_groups))
        return [p for p in now if id(p) not in known]

    def has_gradient_on_master(self) -> bool:
        """Return whether a master has a gradient."""
        return any_has_gradient(self.masters)

    @property
    def in_shards(self) -> bool:
        """Whether FSDP1 divides a parameter between ranks, so that others may have all gradients of this optimizer."""
        return any(map(ranks.is_shard, self.stepped))


def any_has_gradient(params: Iterable[torch.Tensor]) -> bool:
    """Return whether one of ``params`` has a gradient. Without Python's own loop, for it is asked thrice a step."""
    return any(map(operator.is_not, map(_grad_of, params), itertools.repeat(None)))


def _all_in(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    return list(itertools.chain.from_iterable(map(_params_of, groups)))
