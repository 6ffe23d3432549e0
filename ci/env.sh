# shellcheck shell=bash
# The scripts beside this file source it. It sets $root to the checkout and defines
#
#     use_env EXTRAS      make .venv, or reuse and complete it, with xamp[EXTRAS] editable in it; sets $py
#
# If $PYTHON already has torch (on a GPU or NPU machine), that torch is used; else the pinned one is installed.
#
# Where ci/constraints has a lock for this Python and machine (ci/lock.sh makes them), all is installed by it: each file
# must have one of its hashes. Elsewhere, or where a torch is there that the lock does not name, the versions that the
# constraints name are installed, without hashes.
#
#     PYTHON              the Python to start from (python3)
#     XAMP_VENV           the folder of the environment (.venv)
#     XAMP_CONSTRAINTS    the pinned versions to install: ci, or a file; several with commas between them (ci)
#     XAMP_LOCK=0         install by versions, not by the lock (an index that has other builds of the same releases);
#                         1: fail where the lock does not fit, in place of installing the versions without hashes
#     XAMP_NO_VENV=1      install nothing, run with $PYTHON as it is (a machine without a package index)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
py=

say() { printf '== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints "VERSION in FOLDER" of the torch that the Python $1 sees; fails if it has none that imports. Device plug-ins
# are not loaded, because a broken plug-in does not make torch itself unusable.
torch_of() {
    (cd / && TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$1" -W ignore -c '
import os, torch
print(torch.__version__, "in", os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null)
}

# Prints the oldest torch that xamp takes, such as 2.7.1.
minimum_torch() {
    sed -n 's/^MINIMUM_TORCH = (\([0-9]*\), \([0-9]*\), \([0-9]*\))$/\1.\2.\3/p' "$root/xamp/registry/find_torch.py"
}

# Succeeds if $1 (VERSION...) is the oldest torch that xamp takes, or newer.
torch_is_supported() {
    local version minimum place
    IFS=. read -ra minimum <<<"$(minimum_torch)"
    IFS=. read -ra version <<<"${1%%[!0-9.]*}.0.0"
    for place in 0 1 2; do
        [ "${version[place]}" -eq "${minimum[place]}" ] || break
    done
    [ "${version[place]}" -ge "${minimum[place]}" ]
}

make_venv() {
    local python=$1 venv=$2 found
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$python is $("$python" -V 2>&1); xamp needs Python 3.10 or newer. Name another one: PYTHON=python3.12 $0"
    local options=(--clear)
    found=$(torch_of "$python") || found=
    if [ -n "$found" ] && torch_is_supported "$found"; then
        say "making $venv; it uses the torch of $python ($found)"
        options+=(--system-site-packages)
    elif [ -n "$found" ]; then
        say "making $venv with a torch of its own: $python has torch $found, and xamp needs $(minimum_torch) or newer"
        found=
    else
        say "making $venv ($("$python" -V))"
    fi
    "$python" -m venv "${options[@]}" "$venv" ||
        die "python -m venv failed; on Debian and Ubuntu install python3-venv, then run $0 again"
    if [ -n "$found" ] && ! torch_of "$venv/bin/python" >/dev/null; then
        # $python is in a virtual environment, which --system-site-packages does not include, so name its folders.
        "$python" -c 'import sysconfig as s; print(*{s.get_path("purelib"), s.get_path("platlib")}, sep="\n")' \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/calling-python.pth"
    fi
}

# Writes to $1/kept.txt the packages that were there before and stay as they are: torch and what it was built against.
# Writes to $1/pins.txt the other pins of the files that follow.
split_pins() {
    "$py" - "$@" <<'END'
import importlib.metadata
import pathlib
import re
import sys

state, *pins = map(pathlib.Path, sys.argv[1:])
kept = {}
for name in ("torch", "torch-npu", "numpy", "scipy", "triton"):
    try:
        kept[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
lines = [line for path in pins for line in path.read_text(encoding="utf-8").splitlines()]
others = [line for line in lines if re.split(r"[=<>;\s]", line)[0] not in kept]
(state / "kept.txt").write_text("".join(f"{name}=={version}\n" for name, version in kept.items()), encoding="utf-8")
(state / "pins.txt").write_text("\n".join(others) + "\n", encoding="utf-8")
END
}

# Each of $1 (EXTRA,EXTRA) stands in one of the lines of $2, which are of the same kind.
has_extras() {
    local extra there=,${2//$'\n'/,},
    for extra in ${1//,/ }; do
        case $there in *,"$extra",*) ;; *) return 1 ;; esac
    done
}

# Prints what the names of locks have for the Python $py, such as cp311-linux-x86_64.
python_tag() {
    "$py" -c '
import platform, sys
print("cp{}{}-{}-{}".format(*sys.version_info[:2], sys.platform, platform.machine()))'
}

# Prints the lock for the constraints $1 (NAME,NAME) and the extras $2; fails, and says why, if none suits this Python.
# One that is named after the first of the extras comes before one for all that the constraints are for.
lock_for() {
    local lock tag
    [ "${XAMP_LOCK:-1}" != 0 ] || return 1
    tag=$(python_tag)
    lock=ci/constraints/ci-${2%%,*}-$tag.lock
    [ -f "$lock" ] || lock=ci/constraints/${1//,/-}-$tag.lock
    if [ ! -f "$lock" ]; then
        say "there is no lock for this Python (ci/lock.sh makes one): installing by versions, without hashes" >&2
        return 1
    fi
    has_extras "$2" "$(sed -n 's/^# extras: //p' "$lock")" || return 1
    if ! lock_keeps "$lock"; then
        say "$lock names other versions of what is there and stays: installing by versions, without hashes" >&2
        return 1
    fi
    printf '%s\n' "$lock"
}

# Succeeds if the lock $1 names the very versions of torch, and of what it was built against, that $py has already.
lock_keeps() {
    "$py" - "$1" <<'END'
import importlib.metadata
import re
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", file.read(), re.M))
for name in ("torch", "torch-npu", "numpy", "scipy"):
    try:
        there = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        continue
    if locked.get(name) != there:
        sys.exit(1)
END
}

# Installs what the lock $1 names, pip itself first, then xamp with nothing else.
install_locked() {
    local pip=("$py" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"})
    "${pip[@]}" --require-hashes --requirement <(sed -n '/^pip==/,/[^\\]$/p' "$1") &&
        "${pip[@]}" --require-hashes --requirement "$1" &&
        "${pip[@]}" --no-index --no-deps --no-build-isolation --editable .
}

use_env() {
    local extras=$1 python=${PYTHON:-python3} venv=${XAMP_VENV:-.venv} pins=${XAMP_CONSTRAINTS:-ci}
    cd -- "$root" || exit
    if [ "${XAMP_NO_VENV:-0}" = 1 ]; then
        say "using $python as it is, installing nothing (XAMP_NO_VENV=1)"
        py=$python
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    command -v "$python" >/dev/null || die "no $python here; name a Python 3.10 or newer: PYTHON=/path/to/python $0"
    case $venv in /*) ;; *) venv=$root/$venv ;; esac
    local name files=()
    for name in ${pins//,/ }; do
        case $name in */*) ;; *) name=ci/constraints/$name.txt ;; esac
        [ -f "$name" ] || die "there is no $name; XAMP_CONSTRAINTS is ci, or a path"
        files+=("$name")
    done

    py=$venv/bin/python
    if [ -e "$venv" ] && ! "$py" -c '' 2>/dev/null; then
        say "$venv does not work any more; making it anew"
    fi
    "$py" -c '' 2>/dev/null || make_venv "$python" "$venv"

    local state=$venv/xamp-state key lock=
    key=$("$py" -c '
import hashlib, sys
key = hashlib.sha256(repr(sys.argv[1:2] + [sys.version]).encode())
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        key.update(file.read())
print(key.hexdigest())' "$root" setup.cfg "${files[@]}" ci/env.sh ci/constraints/*.lock)
    if has_extras "$extras" "$(sed -n "s/^$key //p" "$state/ready" 2>/dev/null)"; then
        say "using $venv, which has xamp[$extras]"
        return
    fi
    if lock=$(lock_for "$pins" "$extras"); then
        mkdir -p "$state"
        local quiet=()
        [ -t 1 ] || quiet=(--quiet)
        say "installing what $lock names into $venv (the first time this takes minutes)"
        if install_locked "$lock"; then
            extras=$(sed -n 's/^# extras: //p' "$lock")
        elif [ "${XAMP_LOCK:-}" = 1 ]; then
            die "pip failed, see above. XAMP_LOCK=1 takes nothing but what $lock names"
        else
            say "THE LOCK DOES NOT FIT: $lock names other builds than this index has; installing the same versions UNCHECKED"
            complete_env "$extras" "$venv" "$state" "${files[@]}"
        fi
    else
        complete_env "$extras" "$venv" "$state" "${files[@]}"
    fi
    { grep -Fs -- "$key " "$state/ready" || true; } >"$state/ready.new"
    printf '%s\n' "$key $extras" >>"$state/ready.new"
    mv -- "$state/ready.new" "$state/ready"
}

complete_env() {
    local extras=$1 venv=$2 state=$3 found quiet=() file constraints=()
    shift 3
    for file in "$@"; do constraints+=(--constraint "$file"); done
    [ -t 1 ] || quiet=(--quiet)
    found=$(torch_of "$py") || found=
    if [ -n "$found" ] && [ ! -d "$state" ]; then
        mkdir -p "$state"
        : >"$state/keeps-torch"
    fi
    mkdir -p "$state"
    if [ ! -e "$state/keeps-torch" ]; then
        say "installing torch and xamp[$extras] into $venv by $* (the first time this takes minutes)"
        install_xamp "torch,$extras" "${constraints[@]}" || die "pip failed, see above"
        return
    fi
    split_pins "$state" "$@"
    say "installing xamp[$extras] into $venv; torch ${found%% *} is there and stays"
    install_xamp "$extras" --constraint "$state/kept.txt" --constraint "$state/pins.txt" && return
    say "the pins of $* do not suit what is there; installing without them"
    install_xamp "$extras" --constraint "$state/kept.txt" || die "pip failed, see above"
}

install_xamp() {
    local extras=$1
    shift
    "$py" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} "$@" --editable ".[$extras]"
}
