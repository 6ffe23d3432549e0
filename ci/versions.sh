#!/usr/bin/env bash
# xamp on each release of torch that ci/devices.toml names for the CPU, each in an environment of its own.
#
#     ci/versions.sh make                 makes the environments: some minutes and up to 7 GB each, once
#     ci/versions.sh make 2.7.1 2.8.0     these
#     ci/versions.sh list                 which are there
#     ci/versions.sh run                  on each: tests/unit and tests/conformance on the CPU, two ranks, the demo, and
#                                         that `pip install .` leaves torch as it was; then one table. What came of each
#                                         is kept in ci/nightly/kept/: these are parts of ci/nightly.sh
#     ci/versions.sh run 2.7.1 --quick    tests that take a moment; the options of ci/nightly.sh may follow
#     ci/versions.sh smoke                some tests on the oldest and the newest, where they are there: under a minute
#     ci/versions.sh newest               the quick tests on the newest torch of the index, a pre-release too, if it is
#                                         not in ci/devices.toml yet. Exit code 4 where some fail
#
#     XAMP_VERSIONS    the folder of the environments (xamp-versions in the user's cache). A link in it leads to an
#                      environment of yours: torch-2.8.0-python-3.13 -> /path/to/it
#     PYTHON3_10       a Python 3.10, where none is found; so for the others
#     PYTHON           the Python that runs this; it needs no package
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

py=${PYTHON:-python3}
"$py" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$py is $("$py" -V 2>&1); this needs Python 3.10 or newer. Name another one: PYTHON=python3.12 $0"
cd -- "$root"
exec "$py" -m ci.versions "$@"
