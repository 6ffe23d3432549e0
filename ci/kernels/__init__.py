"""What a card's compiler makes of the kernels, on a machine without a card. See ``ci/kernels.sh``."""
