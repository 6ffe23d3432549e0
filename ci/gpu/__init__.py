"""All that is tested and measured on one card, in stages: ``ci/gpu.sh`` calls it, and says how."""
