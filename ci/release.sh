#!/usr/bin/env bash
# Does what a release takes, up to the tag and the upload, whose commands it prints.
#
#     ci/release.sh 0.1.0         checks that version, changelog and checkout agree; builds and tests sdist and wheel
#     ci/release.sh --rehearse    the same for the version as it stands; only tells what would stop a release
#
# What is to be uploaded is left in dist/, with SHA256SUMS.
set -euo pipefail
# shellcheck source=ci/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
[ $# -eq 1 ] || die "say which version: $0 0.1.0, or $0 --rehearse"

cd -- "$root"
say "version, changelog, checkout"
wrong=()
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' xamp/values/version.py)
[ "$1" = "$version" ] || [ "$1" = --rehearse ] ||
    wrong+=("xamp/values/version.py has $version, and $1 is to be released: write it there")
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || wrong+=("$version is no number such as 0.1.0, or 0.1.0rc1")
newest=$(grep -m 1 '^## \[[0-9]' CHANGELOG.md || true)
date=${newest#"## [$version] - "}
[[ $date =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] && [[ ! $date > $(date -u +%F) ]] ||
    wrong+=("CHANGELOG.md: the newest section is '$newest', and must be '## [$version] - $(date -u +%F)'")
[ -z "$(sed -n '/^## \[Unreleased\]/,/^## \[[0-9]/{/^## /d; /./p}' CHANGELOG.md)" ] ||
    wrong+=("CHANGELOG.md: there is something under [Unreleased]: move it to [$version]")
[ -z "$(git status --porcelain)" ] || wrong+=("the checkout has changes: commit them")
[ -z "$(git tag --list "v$version")" ] || [ "$(git rev-parse "v$version^{commit}")" = "$(git rev-parse HEAD)" ] ||
    wrong+=("the tag v$version is there already, on another commit: take the next number")
[ ${#wrong[@]} -eq 0 ] || printf 'would stop a release: %s\n' "${wrong[@]}"
[ ${#wrong[@]} -eq 0 ] || [ "$1" = --rehearse ] || exit 1

ci/wheel.sh </dev/null
say "dist/SHA256SUMS"
cd dist
sha256sum "xamp-$version-py3-none-any.whl" "xamp-$version.tar.gz" | tee SHA256SUMS
[ "$1" != --rehearse ] || exit 0
cat <<END
Left to do, by hand:
    git tag -a v$version -m 'xamp $version'
    git push origin v$version
    python -m twine upload dist/xamp-$version-py3-none-any.whl dist/xamp-$version.tar.gz
END
