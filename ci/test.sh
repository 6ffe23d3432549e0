#!/usr/bin/env bash
# Runs the tests, with all set-up. Arguments go to pytest: ci/test.sh tests/unit -k scale -x
# --all adds those that take minutes: whole conformance suites, on emulated cards too, and the slow tests of that suite.
# Without arguments, and with --all alone, XAMP_TEST_WORKERS processes (2) share the work; with --all alone coverage and
# its floor are checked too.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test
case "$*" in
'' | --all)
    [ $# -eq 0 ] || set -- "$@" --cov --cov-report=term
    set -- "$@" --numprocesses="${XAMP_TEST_WORKERS:-2}" --dist=loadfile
    ;;
esac
say "running the tests"
exec "$py" -m pytest "$@"
