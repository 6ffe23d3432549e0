#!/usr/bin/env bash
# Builds the site of docs/ into site/. A broken link, or a name without a docstring, is an error. The tools are in an
# environment of their own ($XAMP_DOCS_VENV, .venv-docs), without torch: the reference is read from the source. The
# site asks nothing of the network.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd -- "$root"

# Installs what builds the site, by its hashes where there is a lock for this Python. Not xamp: the reference is of the
# checkout. The packages are the same on all machines; compiled parts of them are not.
install_site_tools() {
    local lock pip=("$py" -m pip install --disable-pip-version-check --quiet)
    lock=ci/constraints/docs-$(python_tag).lock
    if [ "${XAMP_LOCK:-1}" != 0 ] && [ -f "$lock" ]; then
        echo "== installing what $lock names into $venv"
        PIP_NO_COMPILE=false "${pip[@]}" --require-hashes --requirement "$lock" && return
        [ "${XAMP_LOCK:-}" != 1 ] || return 1
        echo "== THE LOCK DOES NOT FIT: installing the same versions UNCHECKED"
    fi
    echo "== installing what ci/constraints/docs.txt names into $venv"
    PIP_NO_COMPILE=false "${pip[@]}" --requirement ci/constraints/docs.txt
}

venv=${XAMP_DOCS_VENV:-.venv-docs}
key=$(cat setup.cfg ci/constraints/docs* ci/docs.sh | sha256sum)
if [ "${XAMP_NO_VENV:-0}" = 1 ]; then
    py=${PYTHON:-python3}
else
    py=$venv/bin/python
    if [ "$(cat "$venv/xamp-key" 2>/dev/null)" != "$key" ]; then
        "${PYTHON:-python3}" -m venv --clear "$venv"
        install_site_tools
        printf '%s\n' "$key" >"$venv/xamp-key"
    fi
fi
echo "== building site/"
exec env NO_MKDOCS_2_WARNING=1 "$py" -m mkdocs build --strict --quiet "$@"
