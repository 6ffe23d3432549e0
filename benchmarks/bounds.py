"""Every bound, in one place. A figure that misses its bound makes ``python -m benchmarks`` end with exit code 1."""

from __future__ import annotations

STEP_RATIO = 0.90
"""xamp's training step over the hand-written ``torch.amp`` loop with ``unscale_``, the same optimizer form on both."""

FORWARD_US = 0.0
"""What a managed forward may cost more than ``with torch.autocast(...)`` around the plain one, in microseconds."""

SYNCS = {"fused": 0, "other": 1, "pass-through": 0}
"""Waits for the device in one step: fused optimizer under dynamic scaling, any other checked step, nothing checked."""

O2_ADAM_BYTES = 18.5
"""Peak bytes a parameter at O2 with Adam and ``fused="auto"``, the gradients cleared before each step."""

IMPORT_MS = 50.0
"""``import xamp`` and the fetching of every public name, beyond ``import torch``."""

OPS_ADDED_US = 8.0
"""An operator that the portable policy adds on a CPU, over the same under ``torch.autocast`` with casts by hand."""

APEX_LISTED_US = 0.5
"""A function on Apex's lists, called with the casts on and nothing to cast, over the same call without."""

APEX_UNLISTED_US = 0.05
"""A function on none of them: it is not touched, and what is left is what this machine cannot tell from nothing."""

OPS_OUTSIDE_RATIO = 1.02
"""An operator outside of autocast, or one that nothing was added for, with the policy in the process over without."""
