#!/usr/bin/env bash
# The mutation gate: makes small faults in the modules that decide, one at a time, and runs the tests that reach each.
# Which modules, and how many faults of each, says ci/mutants.toml, as well as which of them no test can notice. Fails
# where another one is not noticed, and where that list is not true. Needs a checkout with git.
#
#     ci/mutants.sh --map               run the tests once, and note which of them reach which line (minutes)
#     ci/mutants.sh                     all faults that are drawn, one after another; what is known already is not run
#     ci/mutants.sh --sample 20         so many of these; --seed N chooses them, by default the commit does
#     ci/mutants.sh --changed [BASE]    all faults in the functions of xamp/ that differ from BASE, by default from where
#                                       this branch left main
#     ci/mutants.sh --only TEXT         all faults with TEXT in their names, drawn or not
#     ci/mutants.sh ... --list          print which these are, and run none
#     ci/mutants.sh ... --again         run those that are known, too
#     ci/mutants.sh ... --seconds 200   so many seconds of tests on one, for a line that most tests reach (20)
#     ci/mutants.sh ... --keep          write which test noticed each into ci/mutants/killers.tsv, which is committed
#
# The map and the results lie in .mutants/, which git ignores. The test that noticed a fault last time is tried first;
# without a map, then the test files of the module's folder. A result counts as long as the module and the tests are the
# same. XAMP_TEST_WORKERS (2) run at a time.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test,kernels
exec "$py" -m ci.mutants --workers "${XAMP_TEST_WORKERS:-2}" "$@"
