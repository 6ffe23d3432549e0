"""Loss scales, gradients, masters and the step of an optimizer.

- First steps are decided on the host even for fused optimizers: torch's fused SGD makes momentum buffers of
  uninitialised memory on a step that ``found_inf`` skips. A loaded state counts as a first step taken, because a
  resumed run must use the same implementation (fused or not) as the original run: the last bits of the two differ.

- Masters follow the parameters until the first ``scale_loss``. There they take over what was written into the
  parameters, because weights may be initialised or broadcast after ``initialize``. At the first ``scale_loss`` after
  a new DDP was noticed, they also get rank 0's values.
"""
