"""The one pass of an optimizer: gradients that wait for it, and the plans that step its masters and write the model."""
