"""What a CPU's autocast casts to fp32 and a card lacks in 16 bits runs in fp32 on each, in xamp's regions.

Covers: xamp.casting.ops.portable, xamp.casting.ops.table.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from torch import nn
from unlisted_calls import CALLS

import xamp
from xamp.casting.ops import portable
from xamp.casting.ops.parts import exists, has_entry, operator
from xamp.casting.ops.table import OWN, RULES, UNLISTED
from xamp.op_dtypes.survey import own_list

HERE = [name for name in UNLISTED if exists(name)]
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}


def tensors(dtype: torch.dtype) -> Any:
    """A function that makes tensors whose values ``dtype`` has, of that dtype."""
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def results(returned: Any) -> list[torch.Tensor]:
    return [r for r in (returned if isinstance(returned, (tuple, list)) else (returned,)) if r.numel()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overload", HERE)
@pytest.mark.filterwarnings("ignore")
def test_a_region_computes_in_fp32_what_the_lower_dtype_holds(overload: str, level: str) -> None:
    lower, run = LEVELS[level], operator(overload)
    given = CALLS[overload](tensors(lower))
    wanted = run(*[v.float() if isinstance(v, torch.Tensor) and v.dtype is lower else v for v in given])
    session = xamp.session(xamp.initialize(nn.Linear(2, 2), level=level, verbosity=0))
    for region in (session.autocast(), xamp.autocast(dtype=lower)):
        with region:
            found = run(*given)
        for a, b in zip(results(found), results(wanted), strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b)  # fp32's digits: LAPACK's sums depend on where memory begins


def test_the_second_table_is_apart_from_the_first_and_gives_reasons() -> None:
    assert not UNLISTED.keys() & RULES.keys()
    assert set(CALLS) == set(UNLISTED)
    assert list(UNLISTED) == sorted(UNLISTED)
    for rule in UNLISTED.values():
        assert rule.kind == "fp32"
        assert len(rule.reason) > 10
        assert not rule.reason.endswith(".")


def test_a_cpu_lists_all_but_those_that_are_made_of_others() -> None:
    inner = {"fft_hfft2", "fft_hfftn", "fft_ihfft2", "fft_ihfftn"}
    assert UNLISTED.keys() - OWN["cpu"] == inner
    assert own_list("cpu", {}) <= OWN["cpu"] | RULES.keys()
    assert inner <= portable.additions("cpu", {}).keys()
    assert not portable.additions("cpu", {}).keys() & (UNLISTED.keys() - inner)
    assert all(has_entry(name, "AutocastCPU") for name in HERE if name not in inner)


def test_torch_knows_of_no_other_that_a_cpu_casts_and_a_card_has_not() -> None:
    """torch's database of operators says which dtypes a device has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    of_card: dict[str, set[torch.dtype]] = {}
    for op in op_db:
        for name in {op.name.replace("nn.functional.", "").replace(".", "_"), op.aten_name}:
            of_card.setdefault(name, set()).update(op.dtypesIfCUDA or ())
    asked = [(name, of_card[packet]) for name in OWN["cpu"] if (packet := name.partition(".")[0]) in of_card]
    lacking = {name for name, dtypes in asked if torch.bfloat16 not in dtypes}
    assert len(lacking) > 40
    assert lacking <= UNLISTED.keys()


ON_A_CARD = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
sys.path.insert(0, sys.argv[1])
from unlisted_calls import CALLS
from xamp.casting import active
from xamp.casting.region_mark import mark_of
from xamp.casting.ops import portable
from xamp.casting.ops.parts import exists, operator
from xamp.casting.ops.table import UNLISTED
portable.install("cuda", {})
for lower in (torch.float16, torch.bfloat16):
    for name in filter(exists, UNLISTED):
        def seen(inside, dtype):
            leave = active.open_region(mark_of("cuda", lower, portable=True), None) if inside else None
            try:
                with FakeTensorMode():
                    given = CALLS[name](lambda *shape: torch.ones(shape, dtype=dtype, device="cuda"))
                    found = operator(name)(*given)
                    return str([r.dtype for r in (found if isinstance(found, (tuple, list)) else (found,))])
            except Exception as error:
                return str(error).partition(chr(10))[0]
            finally:
                if leave is not None:
                    leave()
        print(name, seen(True, lower) == seen(False, torch.float32), seen(False, lower) != seen(False, torch.float32))
"""


def test_on_a_card_that_lists_none_of_them_they_are_added() -> None:
    """On fake tensors: what the kernels of a card themselves refuse cannot be seen, but what they are given can."""
    support = str(Path(__file__).resolve().parents[2] / "support")
    command = [python() if not torch.version.cuda else sys.executable, "-W", "ignore", "-c", ON_A_CARD, support]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(HERE)
    assert [name for name, same, _ in lines if same != "True"] == []
    assert sum(differs == "True" for *_, differs in lines) > len(HERE), "without a region they get the lower dtype"


def test_outside_of_regions_an_added_entry_passes_the_call_on() -> None:
    xamp.initialize(nn.Linear(2, 2), level="O4", verbosity=0)
    x = torch.randn(4, 6)
    assert torch.equal(torch.fft.hfft2(x), torch.fft.hfftn(x, dim=(-2, -1)))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="Unsupported dtype"):
        torch.fft.hfft2(x.bfloat16())
