#!/usr/bin/env bash
# Sets up all that the tests need, and runs them. Arguments go to pytest: ci/test.sh tests/unit -k scale -x
# --all adds the tests that take minutes: whole conformance suites, also on emulated cards, and the slow tests of that
# suite. Without arguments, or with --all alone, XAMP_TEST_WORKERS processes (2) share the work. With --all alone the
# coverage and its lower bound are checked too.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test
case "$*" in
'' | --all)
    [ $# -eq 0 ] || set -- "$@" --cov --cov-report=term
    # A file stays in one process. They are started in the order of tests/conftest.py: the longest first.
    set -- "$@" --numprocesses="${XAMP_TEST_WORKERS:-2}" --dist=loadfile --no-loadscope-reorder
    ;;
esac
say "running the tests"
exec "$py" -m pytest "$@"
