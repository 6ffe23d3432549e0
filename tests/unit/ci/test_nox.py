"""noxfile.py: the pipeline's weekly jobs are its sessions, and call what is there.

Covers: noxfile.py.
"""

from __future__ import annotations

import shlex

import pytest
from ci_scripts import ROOT

from ci.devices import load

nox = pytest.importorskip("nox", reason="the environments of other releases of torch have none")
from nox.registry import get  # noqa: E402

import noxfile  # noqa: E402


def test_the_weekly_jobs_are_sessions_and_call_what_is_there() -> None:
    found = get()
    for job in (job for job in load().jobs if job.nightly):
        assert job.run == f"ci/nightly.sh {job.name}"
        assert job.name in found
    for release in load().whole:
        assert found[f"versions-{release.torch}"].python == release.python
    for _, command in noxfile.SCRIPTS.values():
        assert all((ROOT / word.partition("::")[0]).exists() for word in shlex.split(command) if "/" in word)
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["ci/test.sh --quick </dev/null", "ci/test.sh --slow </dev/null"]
