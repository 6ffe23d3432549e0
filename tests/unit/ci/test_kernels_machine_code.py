"""What ``ci/kernels.sh`` reads from machine code: the path of a full block, widths, early uses, roots of zeros.

Covers: ci/kernels/machine_code.py, ci/kernels/amd_code.py, ci/kernels/figures.py.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest

from ci.kernels import amd_code, figures, machine_code
from ci.kernels.driver import Variant
from ci.kernels.figures import Figures
from xamp.onepass import elements

FULL = [
    "LDG.E.64 R2, desc[UR6][R2.64]",
    "@P0 EXIT",
    "@P1 BRA `(.L_masked)",
    "LDG.E.128 R8, desc[UR6][R40.64]",
    "LDG.E.64 R32, desc[UR6][R32.64]",
    "FSEL R20, R8, 1, !P2",
    "VIADD R21, R20, 0xf3000000",
    "MUFU.RSQ R22, R20",
    "ISETP.GT.U32.AND P4, PT, R21, 0x727fffff, PT",
    "@!P4 BRA `(.L_usual)",
    "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath)",
    "BRA `(.L_joined)",
    ".L_usual:",
    "FMUL.FTZ R7, R20, R22",
    ".L_joined:",
    "STG.E.128 desc[UR6][R44.64], R8",
    "EXIT",
    ".L_masked:",
    "LDG.E R8, desc[UR6][R40.64]",
    "STG.E desc[UR6][R44.64], R8",
    "EXIT",
    ".L_end:",
    "BRA `(.L_end)",
]


def code_of(lines: list[str]) -> str:
    """Write instructions as nvdisasm does."""
    at = itertools.count(0, 16)
    return "\n".join(
        line if line.endswith(":") else f"        /*{next(at):04x}*/                   {line} ;" for line in lines
    )


def path_of(lines: list[str]) -> list[machine_code.Instruction]:
    return machine_code.path_of(code_of(lines))


def test_the_path_takes_the_wide_accesses_and_no_slow_path() -> None:
    names = [one.name for one in path_of(FULL)]
    assert names == [
        "LDG.E.64", "EXIT", "BRA", "LDG.E.128", "LDG.E.64", "FSEL", "VIADD", "MUFU.RSQ", "ISETP.GT.U32.AND", "BRA",
        "FMUL.FTZ", "STG.E.128", "EXIT",
    ]  # fmt: skip
    assert machine_code.loads_of(path_of(FULL)) == ([8, 16, 8], [16])


@pytest.mark.parametrize("jump", ["BRX R4", "@P0 BRA `(.L_joined)"])
def test_a_jump_that_is_not_understood_and_a_loop_are_told(jump: str) -> None:
    lines = [jump if line == "EXIT" else line for line in FULL]
    with pytest.raises(ValueError, match="a jump that is not understood" if "BRX" in jump else "has a loop"):
        path_of(lines)


def test_an_element_that_is_used_before_the_last_is_on_its_way() -> None:
    assert machine_code.early_uses(path_of(FULL), 2) == []
    early = [*FULL[:4], "FMUL R20, R10, R10", *FULL[4:]]  # R10 is of the first load, which writes R8 to R11
    assert [one.operands for one in machine_code.early_uses(path_of(early), 2)] == ["R20, R10, R10"]
    assert machine_code.early_uses(path_of([*FULL[:4], "FMUL R20, R12, R12", *FULL[4:]]), 2) == []


def changed(old: str, new: str) -> list[str]:
    return [line.replace(old, new) for line in FULL]


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
    assert [one.name for one in path][2:4] == ["s_cbranch_vccnz", "global_load_dwordx4"]
    assert amd_code.early_uses(path) == []


@pytest.mark.parametrize(
    "early", ["v_mov_b32_e32 v10, v6", "s_waitcnt vmcnt(0)", "v_pk_mul_f32 v[2:3], v[7:8], s[0:1]"]
)
def test_what_uses_or_awaits_an_element_of_amd_early(early: str) -> None:
    at = AMDS.index("read global_load_dwordx2 v[8:9], v1, s[4:5]")
    (found,) = amd_code.early_uses(amd_code.path_of(amd_code_of([*AMDS[:at], early, *AMDS[at:]])))
    assert f"{found.name} {found.operands}" == early


@pytest.mark.parametrize(("jump", "said"), [("s_branch .LBB0_3", "a loop"), ("s_setpc_b64 s[30:31]", "not understood")])
def test_a_jump_of_amd_that_is_not_understood_is_told(jump: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        amd_code.path_of(amd_code_of([*AMDS[:-2], jump, *AMDS[-2:]]))


def test_a_root_of_zero_takes_the_usual_path() -> None:
    assert machine_code.is_usual_for_one(path_of(FULL))
    assert not machine_code.is_usual_for_one(path_of(changed("MUFU.RSQ R22, R20", "MUFU.RSQ R22, R8")))
    assert not machine_code.is_usual_for_one(path_of(changed("R8, 1, !P2", "R8, R9, !P2")))
    assert not machine_code.is_usual_for_one(path_of(changed("0xf3000000", "0x00000000")))


ADAM = "RULE=adam DECOUPLED=1 LATE=0 SKIPS=1 PHASE=2 PARAMS=1 LOWS=2 STATE_CODE=1 STATES=2 GRADS=2 BLOCK=1024"
WIDTHS: dict[str, tuple[Variant, tuple[list[int], list[int]]]] = {
    "AdamW": (Variant("step", ADAM), ([16, 16, 16, 8], [16, 8, 16, 16])),
    "LAMB, moments": (
        Variant("step", ADAM.replace("adam", "lamb").replace("PHASE=2", "PHASE=1")), ([16, 16, 16, 8], [16, 16])
    ),
    "LAMB, weights": (Variant("step", ADAM.replace("adam", "lamb")), ([16, 16, 16], [16, 8])),
    "a check": (Variant("sums", "GRADS=2 IN_PLACE=0 CHECKS=1 SCALED=1 BLOCK=4096"), ([16, 16], [])),
    "in place": (Variant("sums", "GRADS=1 IN_PLACE=1 CHECKS=1 SCALED=1 BLOCK=4096"), ([16] * 4, [16] * 4)),
}  # fmt: skip


def test_the_widths_that_elements_need() -> None:
    for name, (variant, wanted) in WIDTHS.items():
        assert figures.wanted_widths(variant) == wanted, name


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


def test_the_table_is_written_as_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    rows = figures.read()
    assert 40 <= len(rows) <= figures.MOST == 60
    assert figures.written(rows) == figures.FILE.read_text(encoding="utf-8")
    assert {" ".join(variant) for variant in rows} >= {*figures.BOUNDS}
    monkeypatch.setattr(figures, "MOST", 1)
    with pytest.raises(ValueError, match="rows: at most 1 are"):
        figures.read()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("at", "is_on_path"), [("LDG.E.128 R8", True), ("LDG.E R8", False)])
def test_spills_count_everywhere_or_on_the_path(
    monkeypatch: pytest.MonkeyPatch, strict: bool, at: str, is_on_path: bool
) -> None:
    place = next(number for number, line in enumerate(FULL) if line.startswith(at))
    code = code_of([*FULL[:place], "STL.64 [R1], R2", *FULL[place:]])
    monkeypatch.setattr(machine_code, "resources", lambda cubin: {"REG": 64, "STACK": 0, "LOCAL": 0})
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: code)
    kernel = types.SimpleNamespace(asm={"cubin": b""}, metadata=types.SimpleNamespace(num_warps=8))
    _, wrong = figures.of_kernel(Variant("step", ADAM), kernel, "sm_90", strict=strict)
    assert any("spilled" in one for one in wrong) is (strict or is_on_path)
