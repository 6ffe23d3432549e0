#!/usr/bin/env bash
# The mutation gate: makes one deliberate fault in the core after another, and runs the test that must fail on it. The
# faults are data, in ci/mutations/. Fails below 95 % caught, and where the list is not true any more.
#
#     ci/mutants.sh                       all of them (minutes)
#     ci/mutants.sh --sample 20           a sample; --seed N chooses it, by default the commit does
#     ci/mutants.sh --only NAME           one, by its name or a part of it
#     ci/mutants.sh --find                fills in the tests of entries that have `look`, files to search, in their place
#
# XAMP_TEST_WORKERS (2) of them run at a time.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test
say "running mutants"
exec "$py" ci/mutants.py --workers "${XAMP_TEST_WORKERS:-2}" "$@"
