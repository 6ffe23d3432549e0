#!/usr/bin/env bash
# Says what a pipeline may keep between runs of the emulated Ascend card: a folder, with torch-npu's wheel unpacked and the
# compiled stand-in for CANN, and a key that changes with what is in it.
#
#     ci/npu_cache.sh              prints folder=... and key=..., for a CI that keeps folders by keys
#     ci/npu_cache.sh --github     also hands them to later steps of a job of GitHub Actions
#
#     XAMP_CACHE     the folder
#     XAMP_TORCH     the version of torch (the pinned one)
#     XAMP_PYTHON    the version of Python, such as 3.11 (that of python3)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

torch=${XAMP_TORCH:-$(sed -n 's/^torch==//p' "$root/ci/constraints/ci.txt")}
python=${XAMP_PYTHON:-$(python3 -c 'import sys; print("{}.{}".format(*sys.version_info[:2]))')}
made=$(cat "$root"/backends/npu/emulation/{cann.c,cuda.c,asked.py,cuda_half.py,elf.py,library.py,wheel.py} | sha256sum | cut -c 1-16)
system=$(uname -sm | tr ' ' -)
found="folder=${XAMP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/xamp}
key=xamp-npu-$system-${ImageOS:-own}-python$python-torch$torch-$made"
printf '%s\n' "$found"
if [ "${1:-}" = --github ]; then
    printf '%s\n' "$found" >>"${GITHUB_OUTPUT:?--github is for a step of GitHub Actions}"
fi
