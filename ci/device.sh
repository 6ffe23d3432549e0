#!/usr/bin/env bash
# Tests one device of ci/devices.toml, or runs one of its jobs. CI calls this, and so does a person.
#
#     ci/device.sh cpu                           the conformance suite on that device; the result goes into results/
#     ci/device.sh ascend-910b2 --clause 'probe.*'    further words go to xamp conformance
#     ci/device.sh cuda -- python train.py       a command of yours on that device, in the folder where you are
#     ci/device.sh lint                          a job
#
# A device that is named is required: where it is not there this fails, and says why. Without a word it lists the names.
# ci/env.sh has the variables of the environment; besides them there are
#
#     XAMP_TORCH           the version of torch to install and to insist on
#     XAMP_REQUIREMENTS    a file of requirements of your project, to install too
#     XAMP_RESULTS         the folder of the results (results)
#     XAMP_BY              who runs this, "project" or "contributor"; the result says it (contributor)
#     XAMP_DEVICES         another data file
set -euo pipefail
here=$PWD
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

[ $# -gt 0 ] || {
    "${PYTHON:-python3}" "$root/ci/devices.py" names
    die "name one of these: $0 cpu"
}
name=$1
shift
script=$("${PYTHON:-python3}" "$root/ci/devices.py" script "$name") || exit
if [ -n "$script" ]; then
    read -ra words <<<"$script"
    cd -- "$root"
    exec "${words[@]}" "$@"
fi

if [ -n "${XAMP_TORCH:-}" ] && [ "${XAMP_NO_VENV:-0}" != 1 ]; then
    pins=$(mktemp)
    trap 'rm -f -- "$pins"' EXIT
    "${PYTHON:-python3}" "$root/ci/devices.py" pins "$XAMP_TORCH" >"$pins"
    export XAMP_CONSTRAINTS=$pins
fi
use_env test,kernels
if [ -n "${XAMP_REQUIREMENTS:-}" ]; then
    [ "${XAMP_NO_VENV:-0}" != 1 ] ||
        die "XAMP_NO_VENV=1 installs nothing: leave XAMP_REQUIREMENTS=$XAMP_REQUIREMENTS away, and install it yourself"
    cd -- "$here"
    say "installing $XAMP_REQUIREMENTS; torch stays"
    torch=$(torch_of "$py") || die "there is no torch for $py"
    "$py" -m pip install --disable-pip-version-check --quiet --requirement "$XAMP_REQUIREMENTS" "torch==${torch%% *}"
fi
cd -- "$here"
"$py" "$root/ci/run_device.py" "$name" "$@"
