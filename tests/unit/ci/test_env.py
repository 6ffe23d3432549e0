"""Which torch the scripts of ci/ take: what xamp/registry/find_torch.py says, and no number of their own.

Covers: ci/env.sh, xamp.registry.find_torch.
"""

from __future__ import annotations

import subprocess

from ci_scripts import ROOT
from torch_versions import MINIMUM, OLDER


def says(command: str) -> tuple[int, str]:
    """The exit code and the output of a command to which ``ci/env.sh`` is known."""
    script = f'. "{ROOT}/ci/env.sh"; {command}'
    done = subprocess.run(["bash", "-euc", script], cwd="/", capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def test_the_oldest_is_that_of_xamp() -> None:
    assert says("minimum_torch") == (0, MINIMUM)


VERSIONS = {
    **dict.fromkeys((f"{MINIMUM}+cu130", f"{MINIMUM}a0", "2.10.0a0+git1", "2.10", "2.99.1", "3.0"), "taken"),
    **dict.fromkeys((OLDER, "1.99.9", "2.7", f"{OLDER}+cpu in /a/3.0"), "not taken"),
}


def test_an_older_one_is_not_taken() -> None:
    asked = "".join(f"torch_is_supported '{version}' && echo taken || echo not taken\n" for version in VERSIONS)
    assert dict(zip(VERSIONS, says(asked)[1].splitlines(), strict=True)) == VERSIONS
