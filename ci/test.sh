#!/usr/bin/env bash
# Runs the tests, with all set-up. Arguments go to pytest: ci/test.sh tests/unit -k scale -x
# Coverage and its floor are checked when the whole suite runs, which is: without arguments.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test
if [ $# -eq 0 ]; then
    set -- --cov --cov-report=term
fi
say "running the tests"
exec "$py" -m pytest "$@"
