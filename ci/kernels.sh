#!/usr/bin/env bash
# What a card's compiler makes of the kernels of xamp.onepass, without a card: Triton's JIT, its compilers and NVIDIA's
# assembler come with its wheel. Every launch that the step in one pass, its check and the optimizers of xamp.apex make
# is bound and specialised by the JIT; the variants in ci/kernels/table.tsv are compiled, and the machine code is read:
# spills, widths of loads and stores, elements that are used before all are on their way, instructions, registers.
#
#     ci/kernels.sh                    for sm_90 and gfx942: two minutes on one core
#     ci/kernels.sh sm_80 sm_100       for others
#     ci/kernels.sh --write            write what is counted into the table
#     ci/kernels.sh --triton 3.3.1     by another Triton, which is installed in a folder of its own; "newest": of the
#                                      index. All is bound and compiled, and read as far as a full block goes, but no
#                                      counts are compared
#     ci/kernels.sh --counts-differ    compare no counts: where another Triton than the pinned one is installed
#
#     XAMP_TRITONS     the folder of other Tritons (xamp-tritons in the user's cache)
#
# A line of the table with a kernel and its constants alone is measured by --write.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

triton=
if [ "${1:-}" = --triton ]; then
    [ -n "${2:-}" ] || die "--triton needs a version, or the word newest"
    triton=$2
    shift 2
    set -- --counts-differ "$@"
fi
use_env test,kernels
cd -- "$root"
if [ -n "$triton" ]; then
    folder=${XAMP_TRITONS:-${XDG_CACHE_HOME:-$HOME/.cache}/xamp-tritons}/$triton
    if [ "$triton" = newest ]; then
        "$py" -m pip install --quiet --no-deps --upgrade --target "$folder" triton
    elif [ ! -d "$folder/triton" ]; then
        "$py" -m pip install --quiet --no-deps --target "$folder" "triton==$triton"
    fi
    export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
    say "Triton $("$py" -c 'import triton; print(triton.__version__)') in $folder"
fi
unset TRITON_INTERPRET
exec "$py" -m ci.kernels "$@"
