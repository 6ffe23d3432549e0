"""Fake tensors: of a device that need not be there, without values."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

__all__ = ["FakeTensorMode", "unset_fake_temporarily"]
