#!/usr/bin/env bash
# What takes too long for each commit: coverage, every test on emulated cards, mutants, libraries, four processes, every
# point of fault injection, every release of torch. The pipeline runs it once a week, and a person before a piece of work
# is called finished. Each part is a session of nox; noxfile.py says what it does.
#
#     ci/nightly.sh                       all parts, of which each takes less than an hour; some hours on two cores
#     ci/nightly.sh coverage mutants      these
#     ci/nightly.sh smoke                 some tests on the oldest and the newest torch, where their environments are there
#     ci/nightly.sh versions-2.8.0 -- --tier=quick    on this release of torch the tests that take a moment
#     ci/nightly.sh --list                which there are; all other options are those of nox
#
# XAMP_NO_VENV=1 runs with the Python that is there, in which nox must be. XAMP_VERSIONS is the folder of the
# environments that releases of torch have (xamp-versions in the user's cache), of up to 7 GB each.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env dev,test,kernels
cd -- "$root"
options=()
case "${1:-}" in '' | -*) ;; *) options+=(--session) ;; esac
exec "$py" -m nox ${options[@]+"${options[@]}"} "$@"
