"""What is kept of Triton's interpreter: kernels compute as without, and nothing stays replaced after a launch."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import interpreting
import pytest

KERNELS = """
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def doubled(x):
        return x + x

    @triton.jit
    def total(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        x = doubled(doubled(tl.load(x_ptr + at, at < size, other=0.0).to(tl.float32)))
        tl.store(out_ptr, tl.sum(x.to(tl.float64), 0))

    @triton.jit
    def wrong(out_ptr):
        tl.store(out_ptr, doubled(no_such_name))
"""
PROGRAM = """
    import os, sys
    os.environ["TRITON_INTERPRET"] = "1"
    kept = sys.argv[1] == "kept"
    sys.path[:0] = sys.argv[2:]
    if kept:
        import interpreting
        interpreting.install()
        interpreting.install()
    from kernels import total, wrong, tl, torch
    from triton.runtime import interpreter
    def members():
        return {(place, name): each for place in (tl, tl.tensor, tl.math) for name, each in vars(place).items()}

    before = members()
    looked, own = [], interpreter.inspect.getmembers
    interpreter.inspect.getmembers = lambda *args: looked.append(args) or own(*args)
    said = []
    for size in (3, 8):
        total[(1,)](torch.arange(10.0) + 1, out := torch.zeros(1, dtype=torch.float64), size, BLOCK=8)
        said.append(out.item())
    try:
        wrong[(1,)](out)
    except Exception as error:
        said.append(type(error).__name__)
    total[(1,)](torch.full((4,), 0.1, dtype=torch.bfloat16), out, 4, BLOCK=4)
    said.append(out.item())
    said.append([name for (_, name), each in members().items() if before.get((_, name)) is not each])
    print([said, len(looked)])
"""


def ran(folder: Path, how: str) -> tuple[Any, int]:
    folder.joinpath("kernels.py").write_text(textwrap.dedent(KERNELS), encoding="utf-8")
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), how, str(Path(interpreting.__file__).parent), str(folder)]
    said, looked = ast.literal_eval(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return said, looked


def test_kernels_compute_as_without_and_nothing_stays_replaced(tmp_path: Path) -> None:
    plain, often = ran(tmp_path, "plain")
    kept, seldom = ran(tmp_path, "kept")
    assert plain == kept
    assert kept[:3] == [24.0, 144.0, "InterpreterError"]
    assert kept[3] == pytest.approx(1.6, rel=1e-2)
    assert not {"load", "store", "sum", "__add__"} & {*kept[4]}  # what Triton leaves behind itself are other names
    assert 0 < seldom < often / 4
