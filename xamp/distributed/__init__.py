"""Processes that share a model: where each parameter lives, who decides on a step, and the words of DDP and FSDP."""
