#!/usr/bin/env bash
# All that is tested and measured on one card, in stages that go on where they were cut off. Ends with a table and one
# file of results, from which ci/validated_page.py makes docs/validated.md.
#
#     ci/gpu.sh                       all stages on the best device, at most 38 minutes
#     ci/gpu.sh conformance device    these
#     ci/gpu.sh --minutes 9           what can be done in so long; call it again for the rest
#     ci/gpu.sh --rehearse            a small part of each stage on the CPU: some minutes on two cores
#     ci/gpu.sh --help                the other options
#
# ci/env.sh has the variables of the environment: XAMP_NO_VENV=1 installs nothing and runs with the Python that is there.
# What a part lacks in that Python is told, and the part left out. Besides them there are
#
#     XAMP_APEX     a folder with the package of the real Apex, its kernels built, to run beside xamp.apex
#     XAMP_BY       who runs this, "project" or "contributor"; the result says it (contributor)
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test,kernels
cd -- "$root"
exec "$py" -m ci.gpu "$@"
