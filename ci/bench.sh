#!/usr/bin/env bash
# Measures xamp on this machine, in one run: against torch.amp by hand, accelerate, Fabric and, where it is installed,
# Apex. Writes figures as JSON and a picture as PNG. 1 if a figure exceeds its bound.
#
#     ci/bench.sh             everything, into docs/performance/: half an hour on two cores. The machine should be idle.
#                             Then put what it prints into docs/performance.md.
#     ci/bench.sh --quick     fewer rounds and no large models, into results/: some minutes
#     ci/bench.sh [--quick] step models ...   some of the benchmarks, into results/; `--` and options for
#                             `python -m benchmarks` may follow
#
# The libraries are in an environment of their own ($XAMP_BENCH_VENV, .venv-bench), by ci/constraints/libraries.txt; torch
# is that of $PYTHON if it has one. Apex is measured if $PYTHON has it: nobody publishes it as a package.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

options=() names=()
while [ $# -gt 0 ]; do
    case $1 in
    --quick) options+=(--quick) ;;
    --)
        shift
        options+=("$@")
        break
        ;;
    -*) die "$1: there are --quick and names of benchmarks; options of 'python -m benchmarks' come after --" ;;
    *) names+=("$1") ;;
    esac
    shift
done
# "false" is how pip spells --no-compile: most files of these libraries are never imported.
PIP_NO_COMPILE=false XAMP_VENV=${XAMP_BENCH_VENV:-.venv-bench} XAMP_CONSTRAINTS=${XAMP_CONSTRAINTS:-ci},libraries \
    use_env bench

folder=results
[ ${#options[@]} -gt 0 ] || [ ${#names[@]} -gt 0 ] || folder=docs/performance
if [ ${#names[@]} -eq 0 ]; then
    names=(all)
    case " ${options[*]-} " in *" --quick "*) ;; *) options+=(--callgrind) ;; esac
fi
mkdir -p "$folder"
name=$("$py" -m benchmarks.machine)
say "measuring into $folder/$name.json and .png"
exec "$py" -m benchmarks "${names[@]}" ${options[@]+"${options[@]}"} --json "$folder/$name.json" --png "$folder/$name.png"
