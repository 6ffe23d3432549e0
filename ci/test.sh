#!/usr/bin/env bash
# Runs the tests, with all set-up. Arguments go to pytest: ci/test.sh tests/unit -k scale -x
# --all adds the tests that take minutes on an emulated card.
# The whole suite, which is: without arguments, or with --all alone, is shared by XAMP_TEST_WORKERS processes (2), and
# coverage and its floor are checked.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test
if [ $# -eq 0 ] || [ "$*" = --all ]; then
    set -- "$@" --cov --cov-report=term --numprocesses="${XAMP_TEST_WORKERS:-2}" --dist=loadfile
fi
say "running the tests"
exec "$py" -m pytest "$@"
