#!/usr/bin/env bash
# Sets up all that the tests need, and runs them; tests/README.md has what stands where.
#
#     ci/test.sh                     what says that xamp works on this machine: at most ten minutes on two cores
#     ci/test.sh --quick             all tests that take a moment, on the CPU: at most five; run it before each commit
#     ci/test.sh --slow              the others; .ci/run runs both
#     ci/test.sh --all               all, with the thorough ones of which the others are samples: hours (ci/nightly.sh)
#     ci/test.sh --costs             all but those, and writes what they took into tests/costs.tsv: on an idle machine
#     ci/test.sh tests/unit -k scale     other arguments go to pytest, after one of the above or alone
#
# XAMP_TEST_WORKERS processes (2) share the work of the first five.
#
# ci/test.sh --libraries runs tests/libraries instead, with the real libraries, in an environment of its own
# ($XAMP_LIBRARIES_VENV, .venv-libraries), which takes torch from the one of the other tests. It writes what it found to
# tests/libraries/results.json, which tables of docs/ show. ci/test.sh --libraries sample runs a part of three libraries
# and writes nothing. Further arguments go to pytest.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test,kernels
# No plugin that happens to be installed takes part: a warning of one, as it starts, would be an error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
plugins=(-p xdist -p hypothesispytest)
if [ "${1:-}" = --libraries ]; then
    shift
    extra=libraries
    [ "${1:-}" != sample ] || extra=libraries-sample
    if [ "${XAMP_NO_VENV:-0}" != 1 ]; then
        # "false" is how pip spells --no-compile: most files of these libraries are never imported.
        PIP_NO_COMPILE=false PYTHON=$py XAMP_VENV=${XAMP_LIBRARIES_VENV:-.venv-libraries} XAMP_CONSTRAINTS=${XAMP_CONSTRAINTS:-ci},libraries \
            use_env $extra,test
    fi
    if [ "${1:-}" = sample ]; then
        shift
        say "running a sample of the tests of libraries"
        exec "$py" -m pytest "${plugins[@]}" tests/libraries/test_{transformers,timm,pytorch_optimizer}.py "$@"
    fi
    [ $# -gt 0 ] || set -- --libraries-json=tests/libraries/results.json
    say "running the tests of libraries"
    exec "$py" -m pytest "${plugins[@]}" --all tests/libraries "$@"
fi
# A file stays in one process. They are started in the order of their costs (tests/support/tiers.py): the longest first.
shared=(--numprocesses="${XAMP_TEST_WORKERS:-2}" --dist=loadfile --no-loadscope-reorder)
# A test that waits for ever ends its process after ten minutes, and is named.
limited=("${shared[@]}" -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
case "${1:-}" in
'') set -- "${limited[@]}" --tier=usual ;;
--quick) shift && set -- "${limited[@]}" --tier=quick "$@" ;;
--slow) shift && set -- "${limited[@]}" --tier=slow "$@" ;;
--all | --costs) set -- "${shared[@]}" "$@" ;;
esac
# Where Python is told not to keep what it compiles, each of the hundreds of processes that tests start would compile what
# it imports of xamp: 0.25 s. A checkout that cannot be written to stays without.
"$py" -m compileall -qq xamp backends tests/support || true
say "running the tests"
exec "$py" -m pytest "${plugins[@]}" "$@"
