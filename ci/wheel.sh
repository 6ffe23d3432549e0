#!/usr/bin/env bash
# Builds sdist and wheel, and leaves them in dist/. Tests both from outside the checkout: pip installs the sdist; the
# wheel's contents and description; and xamp in a fresh environment with torch, in one without torch, and in one where
# importing torch fails.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"

use_env dev,test
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

say "building sdist and wheel"
rm -rf build dist
"$py" -m build --no-isolation --outdir dist . >"$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    die "the build failed"
}
wheel=$(echo "$root"/dist/*.whl) sdist=$(echo "$root"/dist/*.tar.gz)
[ -f "$wheel" ] && [ -f "$sdist" ] || die "expected one wheel and one sdist in dist/, found: $(ls dist)"

say "contents of ${wheel##*/}"
"$py" - "$wheel" <<'END'
import email, pathlib, re, sys, zipfile

archive = zipfile.ZipFile(sys.argv[1])
held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
paths = [path for folder in ("xamp", "backends") for path in pathlib.Path(folder).rglob("*")]
wanted = {path.as_posix() for path in paths if path.suffix in (".py", ".c", ".json")} | {"xamp/py.typed"}
wanted = {re.sub("^(xamp/)?backends/", "xamp/backends/", name) for name in wanted}
assert held == wanted, f"the wheel lacks or must not hold {sorted(held ^ wanted)}"
about = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
assert {"entry_points.txt", "licenses/LICENSE", "METADATA"} <= about.keys(), about
message = email.message_from_string(archive.read(about["METADATA"]).decode())
text = re.sub(r"(?ms)^(```|~~~).*?^\1|`[^`\n]*`", "", str(message.get_payload()))  # code has no links
links = re.findall(r"""\]\(\s*<?([^)>\s]*)|^ {0,3}\[[^\]]+\]:\s*<?(\S*)|(?i:href|src)\s*=\s*["']?([^"'\s>]*)""", text, re.M)
urls = [url.rpartition(",")[2].strip() for url in message.get_all("Project-URL", [])]
nowhere = [url for url in [*map("".join, links), *urls] if not re.match("https?:|mailto:", url)]
assert not nowhere, f"from the page of a package these links of the description lead nowhere: {nowhere}"
print(len(held), "files, as in the checkout")
END

say "installing ${sdist##*/} into a fresh environment"
"$py" -m venv "$work/source"
# With the setuptools of $py, and no index: pip would fetch the newest to build with.
mkdir "$work/tools"
packages=$("$py" -c 'import os, setuptools; print(os.path.dirname(os.path.dirname(setuptools.__file__)))')
ln -s "$packages"/setuptools* "$packages"/_distutils_hack "$work/tools/"
PYTHONPATH=$work/tools "$work/source/bin/python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps \
    --no-build-isolation "$sdist"
"$work/source/bin/python" -I - "$wheel" <<'END'
import importlib.metadata
import sys
import zipfile

import xamp

assert xamp.__file__.startswith(sys.prefix), xamp.__file__
here = {str(path) for path in importlib.metadata.files("xamp") if path.parts[0] == "xamp" and path.suffix != ".pyc"}
held = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if name.startswith("xamp/")}
assert here == held, sorted(here ^ held)
print("xamp", xamp.__version__, "imports, and has the files of the wheel")
END

# fresh_venv NAME: makes an environment with nothing but the wheel. Where XAMP_NO_VENV=1 puts the checkout on the path, pip
# would take that for an installed xamp.
fresh_venv() {
    "$py" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-index --ignore-installed "$wheel"
}

# The environment sees all packages of $py except the checkout: Python searches a folder named in a .pth file last, and
# does not read that folder's own .pth files, such as the one of the editable install.
say "testing the wheel in a fresh environment, with the torch of $py"
fresh_venv full
"$py" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
    >"$("$work/full/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tools.pth"
mkdir "$work/elsewhere"
cd -- "$work/elsewhere"
unset PYTHONPATH
XAMP_WHEEL_TEST=1 "$work/full/bin/python" -m pytest --config-file="$root/pyproject.toml" --rootdir="$root" \
    -p no:cacheprovider --quiet "$root/tests/packaging"
"$work/full/bin/xamp" doctor
"$work/full/bin/python" -m xamp doctor --json >/dev/null

# doctor_fails NAME: checks that `import xamp` works there, and that the doctor reports torch with status 1, without a
# traceback.
doctor_fails() {
    local status=0
    "$work/$1/bin/python" -c 'import xamp; print("xamp", xamp.__version__, "imports")'
    "$work/$1/bin/xamp" doctor >"$work/doctor.txt" 2>&1 || status=$?
    cat "$work/doctor.txt"
    [ "$status" -eq 1 ] || die "xamp doctor ended with status $status, not 1"
    grep -q torch "$work/doctor.txt" || die "xamp doctor does not speak of torch"
    ! grep -q Traceback "$work/doctor.txt" || die "xamp doctor ended in a traceback"
}

say "testing it without torch"
fresh_venv bare
doctor_fails bare

say "testing it with a torch that does not import"
packages=$("$work/bare/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$packages/torch"
echo 'raise ImportError("libdevice.so.1: cannot open shared object file")' >"$packages/torch/__init__.py"
doctor_fails bare
say "the wheel is sound: ${wheel##*/}"
