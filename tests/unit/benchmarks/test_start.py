"""The benchmarks start with what their extra installs.

Covers: benchmarks.__main__.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmarks_need_no_pytest() -> None:
    """``xamp[bench]`` does not install it, and a checkout's other environment, which has it, hides that."""
    code = "import sys; sys.modules['pytest'] = None; import benchmarks.__main__; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr
