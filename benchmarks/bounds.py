"""All bounds, in one place. If a figure exceeds its bound, ``python -m benchmarks`` ends with exit code 1."""

from __future__ import annotations

STEP_RATIO = {"SGD foreach": 0.80, "SGD fused": 0.80, "Adam fused": 0.90}
"""Time of xamp's training step over that of the ``torch.amp`` loop with ``unscale_``, both with one optimizer form."""

STEP_RATIO_WITHOUT_UNSCALE = {"SGD foreach": 0.85, "SGD fused": 0.85, "Adam fused": 0.92}
"""The same over a loop that does not call ``unscale_``, so that its optimizer unscales where it can."""

SCALER_RATIO = 1.08
"""Time of a training step under ``xamp.GradScaler`` over one under torch's, in each form and size."""

SCALER_MEDIAN = 1.03
"""The median of these ratios over all forms and sizes."""

FORWARD_US = 0.0
"""Extra microseconds of a managed forward over ``with torch.autocast(...)`` around the plain one."""

SYNCS = {"fused": 0, "other": 1, "pass-through": 0}
"""Waits for the device in one step: a fused optimizer under dynamic scaling, any other checked step, no check."""

O2_ADAM_BYTES = 18.5
"""Peak bytes for each parameter at O2 with Adam and ``fused="auto"``, if gradients are cleared before each step."""

O2_ADAM_ACCUMULATION_BYTES = 20.8
"""The same where two micro-batches make a step, also where it was to be one pass: the fp32 gradients of the first are
there besides the 16-bit ones of the second."""

ONE_PASS_BYTES = 16.3
"""Peak bytes for each parameter at O2 with AdamW in one pass: 2 weight, 2 gradient, 4 master, 8 moments."""

ONE_PASS_MOVED = 30.0
"""Bytes for each parameter that check and step of AdamW read and write at O2: 28, and the gradient once more."""

ONE_PASS_LAUNCHES = 4
"""Kernels and copies of a step in one pass, for any number of tensors, groups and dtypes."""

ONE_PASS_CLIPPED_LAUNCHES = 6
"""The same with clipping: the norm, and the factor."""

IMPORT_MS = 50.0
"""Milliseconds for ``import xamp`` and access to every public name, after ``import torch``."""

OPS_ADDED_US = 8.0
"""Extra microseconds of an operator that the policy adds on a CPU, over ``torch.autocast`` and casts by hand."""

APEX_LISTED_US = 0.5
"""Extra microseconds of a function on Apex's lists with the casts installed, if nothing needs a cast."""

APEX_UNLISTED_US = 0.05
"""The same for a function on no list. It is not replaced, so the figure is only the noise of the measurement."""

APEX_OPTIMIZER_BEYOND_BYTES = 2.25
"""Bytes for each parameter that a step of ``xamp.apex``'s optimizers takes beyond what is held between steps, if there
are as many parameters as 16 pieces of lists have: eight and a half temporaries of a piece, in fp32, with its norms."""

OPS_OUTSIDE_RATIO = 1.02
"""Time of an operator outside autocast, or without an entry, in a process with the policy over one without it."""

TRACE_RATIO = 1.02
"""Time of a training step that ``xamp.trace`` records at its default rate over one that it does not."""

PORTABLE_RATIO = 1.05
"""Time of a whole training step under the portable op policy over one under the device's native one."""

BYTECODES_RATIO = {
    "SGD foreach, 1": 1.42,
    "SGD foreach, 50": 0.94,
    "SGD fused, 1": 1.05,
    "SGD fused, 50": 0.85,
    "Adam fused, 1": 1.05,
    "Adam fused, 50": 0.90,
}
"""Python's bytecodes in xamp's step over those in the ``torch.amp`` loop with ``unscale_``, by optimizer and number of
parameters: 5 % above what was counted, since versions of Python differ.

Before the step was cut anew they were 1.17, 0.89, 0.86, 0.80, 0.87 and 0.88: these are to be reached again."""

INSTRUCTIONS_RATIO = 0.90
"""The processor's instructions of xamp's step over those of the ``torch.amp`` loop with ``unscale_``."""
