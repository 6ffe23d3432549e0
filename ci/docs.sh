#!/usr/bin/env bash
# Builds the site of docs/ into site/. A broken link, or a name without a docstring, is an error. The tools are in an
# environment of their own ($XAMP_DOCS_VENV, .venv-docs), without torch: the reference is read from the source. The
# site asks nothing of the network.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

venv=${XAMP_DOCS_VENV:-.venv-docs}
key=$(cat setup.cfg ci/constraints/docs.txt | sha256sum)
if [ "${XAMP_NO_VENV:-0}" = 1 ]; then
    py=${PYTHON:-python3}
else
    py=$venv/bin/python
    if [ "$(cat "$venv/xamp-key" 2>/dev/null)" != "$key" ]; then
        echo "== installing what builds the site into $venv by ci/constraints/docs.txt"
        "${PYTHON:-python3}" -m venv --clear "$venv"
        # Not xamp: the reference is of the checkout.
        PIP_NO_COMPILE=false "$py" -m pip install --disable-pip-version-check --quiet \
            --requirement ci/constraints/docs.txt
        printf '%s\n' "$key" >"$venv/xamp-key"
    fi
fi
echo "== building site/"
exec env NO_MKDOCS_2_WARNING=1 "$py" -m mkdocs build --strict --quiet "$@"
