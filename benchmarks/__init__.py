"""Ratios and counts that contract.md section 9 bounds; ``python -m benchmarks`` runs them, README.md says how."""
