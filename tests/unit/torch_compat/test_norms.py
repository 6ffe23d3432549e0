"""The classes of norms that are found through public ones are torch's.

Covers: xamp.torch_compat.norms.
"""

from __future__ import annotations

import torch
from torch import nn

from xamp.torch_compat.norms import BATCH_NORM, NORM


def test_they_are_the_classes_that_torch_derives_its_norms_from() -> None:
    assert BATCH_NORM is torch.nn.modules.batchnorm._BatchNorm
    assert NORM is torch.nn.modules.batchnorm._NormBase
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d)
    assert all(issubclass(each, BATCH_NORM) for each in batch)
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    assert all(issubclass(each, NORM) and not issubclass(each, BATCH_NORM) for each in instance)
    assert not issubclass(nn.LayerNorm, NORM)
