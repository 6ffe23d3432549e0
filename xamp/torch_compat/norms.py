"""The classes of norms that ``isinstance`` is asked about: found through public ones, for their names are private."""

from __future__ import annotations

from torch import nn

__all__ = ["BATCH_NORM", "NORM"]

BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]
"""The class of batch norms of all dimensions."""

NORM: type[nn.Module] = next(each for each in nn.InstanceNorm1d.__mro__ if issubclass(nn.BatchNorm1d, each))
"""That of batch norms and instance norms."""
