#!/usr/bin/env bash
# Renews the locks: what CI installs, whole, with hashes and without the address of any index. There is one for each
# Python and machine, ci/constraints/NAME-cp311-linux-x86_64.lock; this makes those of $PYTHON (python3) here.
#
#     ci/lock.sh              all: ci (tests, lint, packaging), ci-libraries and ci-libraries-sample (tests of libraries),
#                             docs (the site)
#     ci/lock.sh ci           one
#
# Versions are the newest that ci/constraints/*.txt and setup.cfg allow. Hashes of files that the locks have already
# stay beside the new ones as long as the version is the same: the same release may lie on other indexes in other builds.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

cd -- "$root"
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
py=$work/venv/bin/python

# resolve NAME EXTRAS REQUIREMENTS: writes the lock NAME of what pip would install.
resolve() {
    local name=$1 extras=$2 to
    shift 2
    to=ci/constraints/$name-$(python_tag).lock
    say "$to"
    # With --report pip says what it would install and installs nothing.
    "$py" -m pip install --disable-pip-version-check --quiet --dry-run --ignore-installed --only-binary :all: \
        --report "$work/$name.json" "$@" pip setuptools
    "$py" ci/lock.py "$work/$name.json" "$to" "$extras"
}

# lock NAME EXTRAS CONSTRAINT...
lock() {
    local name=$1 extras=$2 file constraints=()
    shift 2
    for file in "$@"; do constraints+=(--constraint "ci/constraints/$file.txt"); done
    resolve "$name" "$extras" "${constraints[@]}" ".[$extras]"
}

[ $# -gt 0 ] || set -- ci ci-libraries ci-libraries-sample docs
for name in "$@"; do
    case $name in
    ci) lock ci torch,demo,dev,test,kernels ci ;;
    ci-libraries) lock ci-libraries torch,libraries,test ci libraries ;;
    ci-libraries-sample) lock ci-libraries-sample torch,libraries-sample,test ci libraries ;;
    docs) resolve docs none --requirement ci/constraints/docs.txt ;;
    *) die "no lock is called $name; there are ci, ci-libraries, ci-libraries-sample and docs" ;;
    esac
done
