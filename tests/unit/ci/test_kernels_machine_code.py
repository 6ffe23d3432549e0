"""What ``ci/kernels.sh`` reads from machine code: the path of a full block, widths, early uses, roots of zeros.

Covers: ci/kernels/machine_code.py, ci/kernels/amd_code.py, ci/kernels/figures.py.
"""

from __future__ import annotations

import itertools

import pytest

from ci.kernels import amd_code, figures, machine_code
from ci.kernels.driver import Variant
from ci.kernels.figures import Figures
from xamp.onepass import elements

FULL = """\
LDG.E.64 R2, desc[UR6][R2.64]
@P0 EXIT
@P1 BRA `(.L_masked)
LDG.E.128 R8, desc[UR6][R40.64]
LDG.E.64 R32, desc[UR6][R32.64]
FSEL R20, R8, 1, !P2
VIADD R21, R20, 0xf3000000
MUFU.RSQ R22, R20
ISETP.GT.U32.AND P4, PT, R21, 0x727fffff, PT
@!P4 BRA `(.L_usual)
CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath)
BRA `(.L_joined)
.L_usual:
FMUL.FTZ R7, R20, R22
.L_joined:
STG.E.128 desc[UR6][R44.64], R8
EXIT
.L_masked:
LDG.E R8, desc[UR6][R40.64]
STG.E desc[UR6][R44.64], R8
EXIT
.L_end:
BRA `(.L_end)
""".splitlines()


def code_of(lines: list[str]) -> str:
    """Write instructions as nvdisasm does."""
    at = itertools.count(0, 16)
    return "\n".join(
        line if line.endswith(":") else f"        /*{next(at):04x}*/                   {line} ;" for line in lines
    )


def path_of(lines: list[str]) -> list[machine_code.Instruction]:
    return machine_code.path_of(code_of(lines))


def test_the_path_takes_the_wide_accesses_and_no_slow_path() -> None:
    assert machine_code.loads_of(path_of(FULL)) == ([8, 16, 8], [16])
    assert not any(one.name.startswith("CALL") for one in path_of(FULL))


def test_a_jump_that_is_not_understood_and_a_loop_are_told() -> None:
    for jump, said in {"BRX R4": "not understood", "@P0 BRA `(.L_joined)": "has a loop"}.items():
        with pytest.raises(ValueError, match=said):
            path_of([jump if line == "EXIT" else line for line in FULL])
    for jump, said in {"s_setpc_b64 s[30:31]": "not understood", "s_branch .LBB0_3": "a loop"}.items():
        with pytest.raises(ValueError, match=said):
            amd_code.path_of(amd_code_of([*AMDS[:-2], jump, *AMDS[-2:]]))


def test_an_element_that_is_used_before_the_last_is_on_its_way() -> None:
    assert machine_code.early_uses(path_of(FULL), 2) == []
    early = [*FULL[:4], "FMUL R20, R10, R10", *FULL[4:]]  # R10 is of the first load, which writes R8 to R11
    assert [one.operands for one in machine_code.early_uses(path_of(early), 2)] == ["R20, R10, R10"]
    assert machine_code.early_uses(path_of([*FULL[:4], "FMUL R20, R12, R12", *FULL[4:]]), 2) == []


def amd_code_of(lines: list[str]) -> str:
    """Write instructions as LLVM does; after ``read`` and ``write`` they come from these functions of the kernels."""
    code = [".cfi_startproc", '	.file	2 "/xamp/onepass" "elements.py"']
    for line in lines:
        name, _, rest = line.partition(" ")
        if name in ("read", "write"):
            code.append(f"	.loc	2 {amd_code._lines_of(getattr(elements, name))[-1]} 24 is_stmt 1")
        code.append(line if line.endswith(":") else f"	{rest if name in ('read', 'write') else line}")
        code.append("	.loc	2 1 8                           ; elements.py:1:8")
    return "\n".join([*code, "	.cfi_endproc"])


AMDS = [
    "s_load_dwordx2 s[2:3], s[0:1], 0x0",
    "s_waitcnt lgkmcnt(0)",
    "s_cbranch_vccnz .LBB0_3",
    "read buffer_load_ushort v9, v1, s[4:7], 0 offen",
    "global_store_dwordx2 v8, v[2:3], s[0:1]",  # a sum, which is no element
    "s_branch .LBB0_4",
    ".LBB0_3:",
    "read global_load_dwordx4 v[4:7], v1, s[2:3]",
    "read global_load_dwordx2 v[8:9], v1, s[4:5]",
    "s_waitcnt vmcnt(1)",
    "v_add_f32_e32 v4, v4, v5",
    "write global_store_dwordx4 v1, v[4:7], s[2:3]",
    ".LBB0_4:",
    "s_endpgm",
]


def test_the_path_of_amd_takes_the_wide_accesses_to_elements() -> None:
    path = amd_code.path_of(amd_code_of(AMDS))
    assert amd_code.loads_of(path) == ([16, 8], [16])
    assert amd_code.early_uses(path) == []
    at = AMDS.index("read global_load_dwordx2 v[8:9], v1, s[4:5]")
    for early in ("v_mov_b32_e32 v10, v6", "s_waitcnt vmcnt(0)", "v_pk_mul_f32 v[2:3], v[7:8], s[0:1]"):
        (found,) = amd_code.early_uses(amd_code.path_of(amd_code_of([*AMDS[:at], early, *AMDS[at:]])))
        assert f"{found.name} {found.operands}" == early


def test_a_root_of_zero_takes_the_usual_path() -> None:
    assert machine_code.is_usual_for_one(path_of(FULL))
    changes = {"MUFU.RSQ R22, R20": "MUFU.RSQ R22, R8", "R8, 1, !P2": "R8, R9, !P2", "0xf3000000": "0x00000000"}
    for old, new in changes.items():
        assert not machine_code.is_usual_for_one(path_of([line.replace(old, new) for line in FULL]))


ADAM = "RULE=adam DECOUPLED=1 LATE=0 SKIPS=1 PHASE=2 PARAMS=1 LOWS=2 STATE_CODE=1 STATES=2 GRADS=2 BLOCK=1024"


def test_what_is_more_than_the_table_or_a_promise_says() -> None:
    row, variant = {"sm_90": Figures(10.0, 64, 4)}, Variant("step", "RULE=sgd")
    said = figures.compared(variant, "sm_90", Figures(10.5, 65, 3), row)
    assert [each.partition(" table.tsv")[0] for each in said] == [
        "10.5 instructions an element, where 10.0",
        "65 registers, where 64",
        "3 at a time, where 4",
    ]
    assert figures.compared(variant, "sm_90", Figures(9.0, 60, 5), row) == []
    assert figures.compared(variant, "gfx942", Figures(10.5, 65, 3), row) == []
    (promised,) = figures.compared(Variant("step", ADAM), "sm_90", Figures(61.0, 64, 4), {})
    assert promised == "61.0 instructions an element, where 60 is promised"
