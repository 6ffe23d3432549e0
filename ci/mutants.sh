#!/usr/bin/env bash
# The mutation gate: makes small faults in the modules that decide, one at a time, and runs tests on each. Which ones,
# and which of them no test can notice, says ci/mutants.toml. Fails where another one is not noticed, or where this is
# not true. The test of ci/mutants.tsv comes first, then files of tests that say at their top that they cover the module,
# then the others of its folder.
#     ci/mutants.sh                     all faults that are drawn, XAMP_TEST_WORKERS (2) at a time
#     ci/mutants.sh --sample 20         so many of these; --seed N chooses them, by default the commit does
#     ci/mutants.sh --changed [BASE]    all in what differs in xamp/ from BASE, by default from where it left main
#     ci/mutants.sh --only TEXT         all with TEXT in their names, drawn or not
#     ci/mutants.sh ... --list          print them, and run none
#     ci/mutants.sh ... --seconds 99    tests that take longer are ended, and have noticed it (600)
#     ci/mutants.sh ... --keep          write which test noticed each into ci/mutants.tsv
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
use_env test,kernels
exec "$py" -m ci.mutants --workers "${XAMP_TEST_WORKERS:-2}" "$@"
