#!/usr/bin/env bash
# Runs the matrix without GitHub: on any other CI, or by hand. Every device and job is one call of ci/device.sh.
#
#     ci/matrix.sh                               the conformance suite on all devices that can be run here
#     ci/matrix.sh lint cpu ascend-910a          these devices and jobs; they are required
#     ci/matrix.sh cpu --clause 'probe.*'        further words go to each call of ci/device.sh
#     ci/matrix.sh -- python train.py            a command of yours on all devices that can be run here
#     ci/matrix.sh --list                        the names
#
# All are run, whether or not one before them failed. The exit code is 1 where one failed. Results go into results/, and
# the variables are those of ci/device.sh.
set -euo pipefail
here=$PWD
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

python=${PYTHON:-python3}
if [ "${1:-}" = --list ]; then
    exec "$python" "$root/ci/devices.py" names
fi
names=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
    "$python" "$root/ci/devices.py" script "$1" >/dev/null || exit
    names+=("$1")
    shift
done

report=()
if [ ${#names[@]} -eq 0 ]; then
    while read -r name how; do
        if [ "$how" = hardware ] && ! reason=$("$root/ci/device.sh" "$name" --there 2>&1); then
            report+=("$name left out: $(tail -n 2 <<<"$reason" | head -n 1)")
        else
            names+=("$name")
        fi
    done < <("$python" "$root/ci/devices.py" devices)
fi

status=0
cd -- "$here"
for name in "${names[@]}"; do
    say "$name"
    code=0
    "$root/ci/device.sh" "$name" "$@" </dev/null || code=$?
    if [ "$code" -eq 0 ]; then
        report+=("$name passed")
    else
        report+=("$name failed, exit code $code")
        status=1
    fi
done
say "the matrix"
printf '%s\n' "${report[@]}"
exit "$status"
