#!/usr/bin/env bash
# Does what a release takes, up to the tag and the upload, whose commands it prints.
#
#     ci/release.sh 0.1.0         checks that version, changelog and checkout agree; builds and tests sdist and wheel
#     ci/release.sh --rehearse    the same for the version as it stands; only tells what would stop a release
#
# What is to be uploaded is left in dist/, with SHA256SUMS.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
[ $# -eq 1 ] || die "say which version: $0 0.1.0, or $0 --rehearse"

cd -- "$root"
say "version, changelog, checkout"
"${PYTHON:-python3}" ci/release_check.py "$1"
ci/wheel.sh </dev/null
say "dist/SHA256SUMS"
"${PYTHON:-python3}" ci/release_check.py --sums "$1"
