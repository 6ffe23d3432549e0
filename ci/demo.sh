#!/usr/bin/env bash
# Sets up all that the demo needs, and runs it: two networks at every level of the best device, one table, one picture.
# Arguments go to the demo: ci/demo.sh --help
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env demo
say "running the demo"
exec "$py" examples/demo.py "$@"
