"""Loss scales, gradients, masters and the step of an optimizer."""
