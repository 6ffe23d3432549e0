#!/usr/bin/env bash
# What a card's compiler makes of the kernels of xamp.onepass, without a card: Triton's JIT, its compilers and NVIDIA's
# assembler come with its wheel. Every launch that the step in one pass, its check and the optimizers of xamp.apex make
# is bound and specialised by the JIT; the variants in ci/kernels/table.tsv are compiled, and the machine code is read:
# spills, widths of loads and stores, elements that are used before all are on their way, instructions, registers.
#
#     ci/kernels.sh                    for sm_90 and gfx942: two minutes on one core
#     ci/kernels.sh sm_80 sm_100       for others
#     ci/kernels.sh --write            write what is counted into the table; then ci/performance_page.py
#     ci/kernels.sh --counts-differ    compare no counts: for another Triton than the pinned one
#
# A line of the table with a kernel and its constants alone is measured by --write.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env test,kernels
cd -- "$root"
unset TRITON_INTERPRET
exec "$py" -m ci.kernels "$@"
