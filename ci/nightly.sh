#!/usr/bin/env bash
# What takes too long for each commit: coverage, every test on emulated cards, mutants, libraries, four processes, every
# point of fault injection, every release of torch. The pipeline runs it once a week, and a person before a piece of work is called finished.
#
#     ci/nightly.sh                       all parts, of which each takes less than an hour; some hours on two cores
#     ci/nightly.sh coverage mutants      these
#     ci/nightly.sh --minutes 50          what can be done in so long; call it again for the rest
#     ci/nightly.sh --changed kernels     what is kept of all parts; and runs these if their content is another now
#     ci/nightly.sh --help                the other options
#
# What came of each part is kept in ci/nightly/kept/, with a hash of the content that it tested: commit it.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test,kernels
cd -- "$root"
exec "$py" -m ci.nightly "$@"
