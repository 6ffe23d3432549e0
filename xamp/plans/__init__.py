"""What steps in one pass need of optimizers: which of them step so, with what state, and the plans of the kernels."""
