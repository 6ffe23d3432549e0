#!/usr/bin/env bash
# Runs the demo, with all set-up: two networks at every level this machine's best device can do, one table, one picture.
# Arguments go to it: ci/demo.sh --help
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env demo
say "running the demo"
exec "$py" examples/demo.py "$@"
