#!/usr/bin/env bash
# Runs all tests with their coverage measured, prints it, and fails where it is below the floor: fail_under in
# pyproject.toml. It runs what ci/test.sh --all runs, in the same environment, and takes longer. So .ci/run leaves it out:
# a person runs it before a piece of work is called finished.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/test.sh" --all --cov --cov-report=term
