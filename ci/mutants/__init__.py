"""The mutation gate: it makes faults from the code, and says which of them no test notices. See ``ci/mutants.sh``."""
