#!/usr/bin/env bash
# Renews the locks: what CI installs, whole, with hashes and without the address of any index. There is one for each
# Python and machine, ci/constraints/NAME-cp311-linux-x86_64.lock; this makes those of $PYTHON (python3) here.
#
#     ci/lock.sh              both: ci (tests, lint, packaging) and ci-libraries (tests of libraries)
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

# lock NAME EXTRAS CONSTRAINT...
lock() {
    local name=$1 extras=$2 file constraints=() to
    shift 2
    to=ci/constraints/$name-$(python_tag).lock
    for file in "$@"; do constraints+=(--constraint "ci/constraints/$file.txt"); done
    say "$to"
    # With --report pip says what it would install and installs nothing.
    "$py" -m pip install --disable-pip-version-check --quiet --dry-run --ignore-installed --only-binary :all: \
        --report "$work/$name.json" "${constraints[@]}" ".[$extras]" pip setuptools
    "$py" ci/lock.py "$work/$name.json" "$to" "$extras"
}

[ $# -gt 0 ] || set -- ci ci-libraries
for name in "$@"; do
    case $name in
    ci) lock ci torch,demo,dev,test ci ;;
    ci-libraries) lock ci-libraries torch,libraries,libraries-sample,test ci libraries ;;
    *) die "no lock is called $name; there are ci and ci-libraries" ;;
    esac
done
