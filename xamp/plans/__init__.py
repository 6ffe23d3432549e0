"""The optimizers that step in one pass: which of them do, with what state, and the plans of the kernels for each."""
