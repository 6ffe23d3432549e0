"""``xamp policy``: what it shows of devices that are here and of others, and what it finds to differ between two.

Covers: xamp.cli.policy, xamp.cli._policy_text, xamp.cli._policy_diff, xamp.op_dtypes.survey.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from gpu_kernels import GPU_KERNELS
from site_packages import ROOT, plain_environment
from torch_versions import MINIMUM

import xamp
from xamp.casting.ops.parts import HERE
from xamp.casting.ops.table import LAYERS, RULES
from xamp.cli import main, policy
from xamp.cli._policy_diff import compare
from xamp.cli._policy_text import render_diff, render_show
from xamp.contract import Backend, BackendSpec
from xamp.op_dtypes.observe import is_present
from xamp.op_dtypes.survey import _kind
from xamp.registry.registry import BUILT_INS, REGISTRY, Registry

DEVICES = ("cpu", "cuda", "mps", "xpu")
SERVED = ", ".join(sorted({kind for spec in REGISTRY.specs() for kind in spec.device_types}))
CANNOT = {
    "cpu": list(GPU_KERNELS),
    "cuda": [],
    "mps": sorted([*GPU_KERNELS, "conv_transpose3d.input"]),
    "xpu": list(GPU_KERNELS[3:]),
}
WRITTEN_FROM = (2, 13)
KEYS = ["what", "schema", "torch", "xamp", "device", "present", "op_policy", "dtype", "rows", "device_only"]
FIELDS = ["overload", "rule", "reason", "registered", "native", "added", "results", "source", "agrees", "cannot"]

version = tuple(int(part) for part in torch.__version__.split(".")[:2])
absent = {name: not is_present(name) for name in DEVICES}

# A new process, since this one may have xamp's own entries among torch's registrations.
ASK = """
import contextlib, io, json, sys
from xamp.cli import main
answers = {}
for command in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(command.split())
    answers[command] = code, printed.getvalue()
import torch
keys = ("CPU", "CUDA", "MPS", "XPU")
listed = {key.lower(): torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{key}") for key in keys}
print(json.dumps([answers, listed]))
"""
COMMANDS = [
    *(f"policy show {name} --json --op-policy native" for name in DEVICES),
    "policy diff cpu cuda --json --op-policy native",
]

Saved = dict[str, Any]


@pytest.fixture(scope="module")
def fresh() -> subprocess.CompletedProcess[str]:
    command = [python(), "-W", "error", "-c", ASK, *COMMANDS]
    return subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def shown() -> Callable[..., Saved]:
    """What is shown of a device, through JSON; a copy that a test may change."""
    known: dict[tuple[str, ...], str] = {}

    def show(device: str, op_policy: str = "portable", dtype: str = "float16") -> Saved:
        if (arguments := (device, op_policy, dtype)) not in known:
            known[arguments] = json.dumps(policy.show(*arguments))
        found: Saved = json.loads(known[arguments])
        return found

    return show


def overloads(rows: list[Saved], **having: Any) -> list[str]:
    return [row["overload"] for row in rows if all(row[key] == value for key, value in having.items())]


def row_of(found: Saved, overload: str) -> Saved:
    (row,) = [row for row in found["rows"] if row["overload"] == overload]
    plain: Saved = row
    return plain


def write(path: Path, found: object) -> str:
    path.write_text(json.dumps(found))
    return str(path)


def words(text: str) -> str:
    return " ".join(text.split())


# --- show


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_counts_are_those_of_torchs_registrations(
    device: str, fresh: subprocess.CompletedProcess[str]
) -> None:
    answers, listed = json.loads(fresh.stdout)
    code, text = answers[f"policy show {device} --json --op-policy native"]
    found, names = json.loads(text), {name.removeprefix("aten::") for name in listed[device] if name[:6] == "aten::"}
    assert code == 0
    assert list(found) == KEYS
    assert (found["what"], found["schema"], found["device"]) == ("xamp policy show", 1, device)
    assert (found["torch"], found["xamp"]) == (torch.__version__, xamp.__version__)
    assert (found["op_policy"], found["dtype"], found["present"]) == ("native", "float16", not absent[device])
    assert [row["overload"] for row in found["rows"]] == list(HERE)
    assert all(list(row) == FIELDS for row in found["rows"])
    assert overloads(found["rows"], registered=True) == sorted(names & set(HERE))
    assert found["device_only"] == sorted(names - set(RULES))
    mended = LAYERS if device == "cuda" else frozenset()  # which torch there casts to fp16 in a region of bf16 too
    rest = [row for row in found["rows"] if row["overload"] not in mended]
    assert all((row["native"] == "none") is not row["registered"] for row in rest)
    assert {row["added"] for row in rest} == {None}
    assert {(row["native"], row["added"]) for row in found["rows"] if row not in rest} <= {("float16", "lower")}
    if version == WRITTEN_FROM and device in ("cpu", "mps"):
        assert len(found["device_only"]) == {"cpu": 88, "mps": 2}[device]


def test_nothing_is_printed_beside_the_answer(fresh: subprocess.CompletedProcess[str]) -> None:
    """Not even by torch itself, which the command keeps quiet where it is the first to import it."""
    words = COMMANDS[0].split()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "xamp", *words], env=plain_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == json.loads(fresh.stdout)[0][COMMANDS[0]][1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_portable_is_the_table_but_for_what_has_no_kernel(device: str, dtype: str, shown: Callable[..., Saved]) -> None:
    if version != WRITTEN_FROM:
        pytest.skip("what devices have differs between versions of torch")
    found = shown(device, "portable", dtype)
    (cannot, rest) = ([r for r in found["rows"] if r["cannot"]], [r for r in found["rows"] if not r["cannot"]])
    assert overloads(cannot) == CANNOT[device]
    assert [row["overload"] for row in rest if row["agrees"] is not True] == []
    assert all(row["cannot"] == "it has no kernel" for row in cannot if row["overload"] in GPU_KERNELS)
    assert all(set(row["results"].values()) == {None} for row in cannot if row["overload"] in GPU_KERNELS)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_added_is_what_the_list_lacks_or_has_otherwise(device: str, shown: Callable[..., Saved]) -> None:
    found = shown(device)
    (backend,) = [spec for spec in BUILT_INS if spec.name == device]
    rules = policy._op_rules(backend.name)
    for row in found["rows"]:
        own = rules.get(row["overload"])
        lacks = own != "same" and (own is not None or not row["registered"])
        assert row["added"] == (row["rule"] if lacks else None), row
        if own not in (None, "same"):
            assert row["native"] == own, row


def test_the_cpu_is_called(shown: Callable[..., Saved]) -> None:
    found = shown("cpu")
    assert found["present"] is True
    assert {row["source"] for row in found["rows"] if not row["cannot"]} == {"called"}
    softmax = row_of(found, "softmax.int")
    assert (softmax["rule"], softmax["reason"]) == ("fp32_dtype", RULES["softmax.int"].reason)
    assert (softmax["registered"], softmax["native"], softmax["added"]) == (False, "none", "fp32_dtype")
    assert softmax["results"] == {"fp32": "float32", "lower": "float32", "mixed": None, "named": "float16"}
    assert row_of(found, "mm")["results"] == {"fp32": "float16", "lower": "float16", "mixed": "float16", "named": None}
    assert row_of(found, "grid_sampler")["native"] == "fp32"
    assert set(row_of(found, "binary_cross_entropy")["results"].values()) == {"error", None}


def test_looking_leaves_what_it_looks_at_as_it_was(shown: Callable[..., Saved]) -> None:
    before = shown("cpu", "native")
    policy.show("cpu", "portable")
    again = policy.show("cpu", "native")
    assert again == before
    assert overloads(again["rows"], overload="softmax.int", registered=False) == ["softmax.int"]
    assert torch.softmax(torch.ones(2, dtype=torch.float16), -1).dtype is torch.float16


def test_mixed_products_run_on_the_cpu_though_their_own_composition_refuses_them(shown: Callable[..., Saved]) -> None:
    assert row_of(shown("cpu", "native"), "linalg_multi_dot")["results"]["mixed"] == "error"
    assert row_of(shown("cpu"), "linalg_multi_dot")["results"]["mixed"] == "float16"


# On CUDA recurrent layers go to cuDNN, which no fake tensor shows of GRU's. A build for CUDA asks the driver in each.


def test_what_is_computed_says_so(shown: Callable[..., Saved]) -> None:
    for device in ("cuda", "mps", "xpu"):
        if not absent[device]:
            continue
        found = shown(device)
        computed = overloads(found["rows"], source="table")
        added = [row["overload"] for row in found["rows"] if row["added"]]
        assert found["present"] is False
        assert computed == added


def test_what_cannot_be_seen_and_is_not_computed_is_unknown(shown: Callable[..., Saved]) -> None:
    if not absent["xpu"]:
        pytest.skip("there is a card, which shows it")
    gru = row_of(shown("xpu", "native"), "gru.input")
    assert (gru["source"], gru["agrees"], gru["native"]) == ("unknown", None, "none")
    assert gru["results"] == {"fp32": "unknown", "lower": "unknown", "mixed": "unknown", "named": None}
    assert "not to be seen here: 3\n" in render_show(shown("xpu", "native"))


def test_mps_keeps_fp32_where_its_kernel_refuses_the_lower_dtype(shown: Callable[..., Saved]) -> None:
    row = row_of(shown("mps"), "conv_transpose3d.input")
    assert (row["rule"], row["native"], row["added"]) == ("lower", "fp32", None)
    assert set(row["results"].values()) == {"float32", None}
    assert row["cannot"] == "it keeps its own rule, for want of a kernel that does as the table says"
    assert row_of(shown("mps", "native"), "conv_transpose3d.input")["cannot"] == ""


def test_a_rule_is_known_by_what_it_does() -> None:
    plain: dict[str, str | None] = {"fp32": "float32", "lower": "float16", "mixed": "float32", "named": None}
    assert _kind("mm", {**plain, "fp32": "float16", "mixed": "float16"}, torch.float16) == "lower"
    assert _kind("mm", plain, torch.float16) == "promote"
    assert _kind("mm", {**plain, "lower": "float32"}, torch.float16) == "fp32"
    assert _kind("mm", dict.fromkeys(plain, "error"), torch.float16) == "banned"
    assert _kind("mm", {**plain, "mixed": "float16"}, torch.float16) == "other"
    assert _kind("mm", dict.fromkeys(plain, "unknown"), torch.float16) == "unknown"
    named = {"fp32": "float32", "lower": "float32", "mixed": None, "named": "error"}
    assert _kind("linalg_vector_norm", {**named, "named": "float16"}, torch.float16) == "fp32_dtype"
    assert _kind("linalg_vector_norm", named, torch.float16) == "fp32"


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_text_has_every_row_aligned_and_ends_with_the_counts(
    device: str, shown: Callable[..., Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(device)
    out = render_show(found) + "\n"
    if device == "cpu":  # asked by the command, which surveys it anew
        assert main(["policy", "show", device]) == 0
        assert capsys.readouterr() == (out, "")
    lines = out.splitlines()
    assert lines[0] == f"{device}, portable policy, lower dtype float16"
    at = [lines.index(line) for line in lines if line.split()[:1] == ["overload"]]
    starts = [lines[at[0]].index(name) for name in ("table", "device", "xamp adds", "fp32", "why")]
    rows = {line.split()[0]: line for line in lines if line[:2] == "  " and line.split()[0] in RULES}
    assert sorted(rows) == list(HERE)
    assert len(HERE) == 127 or version != WRITTEN_FROM
    for name, line in rows.items():
        assert all(line[start - 1] == " " != line[start] for start in starts), line
        assert line[starts[0] :].split()[0] == RULES[name].kind
        assert line.endswith(" computed  " + line.split()[-1]) == (row_of(found, name)["source"] == "table")
    text, added = words(out), sum(row["added"] is not None for row in found["rows"])
    plain = len(HERE) - added - len(CANNOT[device])
    if CANNOT[device]:
        assert f"cannot be equalised: {len(CANNOT[device])} overload" in text
        assert list(rows)[: len(CANNOT[device])] == CANNOT[device]
    summary = text[text.rindex(f"{len(HERE)} overloads in the table: ") :]
    assert f"{plain} as the table, without one. " in summary
    assert (f"{added} as the table, by an entry of xamp's; " in summary) == (added > 0)
    assert f" {len(found['device_only'])} entries of the device that the table does not govern." in summary
    assert (f"only in the list of {device}, and left as they are" in text) == bool(found["device_only"])
    assert all(rule.reason in text for rule in HERE.values())


def test_rows_that_differ_come_first(shown: Callable[..., Saved]) -> None:
    titles = [line for line in render_show(shown("cpu", "native")).splitlines() if line[:1] not in ("", " ")]
    assert titles[2].startswith("differs from the table: ")
    assert titles[3] == "cannot be equalised: 5"
    assert titles[4].startswith("as the table, without one: ")


# --- the text in a narrow terminal


@pytest.mark.parametrize("width", [80, 100, 118, 160])
@pytest.mark.parametrize("op_policy", ["portable", "native"])
def test_no_line_is_wider_than_the_terminal(op_policy: str, width: int, shown: Callable[..., Saved]) -> None:
    shows = [shown(name, op_policy) for name in DEVICES]
    texts = [render_show(found, width) for found in shows]
    texts += [render_diff(compare(a, b), width) for a in shows[:2] for b in shows[1:]]
    assert max(len(line) for text in texts for line in text.splitlines()) <= width
    for found, text in zip(shows, texts, strict=False):
        lines = [line.split() for line in text.splitlines()]
        assert {line[0] for line in lines if line and line[0] in RULES} == set(HERE)
        assert words(text).endswith(words(render_show(found)).rpartition("overloads in the table: ")[2])


def test_results_that_make_the_table_too_wide_are_drawn_as_in_a_narrow_terminal(shown: Callable[..., Saved]) -> None:
    """What an operator gives may depend on the call; torch 2.11 has such a row."""
    found = copy.deepcopy(shown("cuda", "native"))
    assert "  overload      " in render_show(found)
    row_of(found, "mm")["results"]["mixed"] = "float16/float32"
    text = render_show(found)
    assert max(map(len, text.splitlines())) <= 118
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["mm"]]
    assert "fp16/fp32" in line


def test_a_narrow_row_tells_all_that_a_wide_one_does(shown: Callable[..., Saved]) -> None:
    lines = [words(line) for line in render_show(shown("cpu"), 80).splitlines()]
    assert "exp fp32 none fp32 fp32 - - 13" in lines
    assert "mm lower same fp16 fp16 fp16 - 7" in lines
    assert "grid_sampler promote fp32 fp32 fp16 fp32 - 17" in lines
    at = lines.index("binary_cross_entropy_with_logits")  # too long for its column
    assert lines[at + 1] == "fp32 same fp32 fp32 fp32 - 11"
    if absent["cuda"]:
        assert "gru.input lower float16 fp16 fp16 fp16 - 19*" in map(words, render_show(shown("cuda"), 80).splitlines())


def test_narrow_differences_stand_one_below_the_other(shown: Callable[..., Saved]) -> None:
    text = render_diff(compare(shown("cpu"), shown("cuda")), 80)
    assert (
        "  cudnn_convolution                    lower\n    cpu   none: no kernel\n    cuda  lower: fp16 fp16 fp16 -\n"
        "    why   cpu: it has no kernel\n" in text
    )


@pytest.mark.parametrize(("columns", "wanted"), [("80", 80), ("200", 118), ("20", 80)])
def test_the_width_is_the_terminals(
    columns: str, wanted: int, shown: Callable[..., Saved], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(tmp_path / "cpu.json", shown("cpu"))
    printed: list[str] = []
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(policy, "_print", printed.append)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert main(["policy", "show", path]) == 0
        assert printed.pop() == render_show(shown("cpu"), wanted if terminal else 118)


# --- diff


def test_cpu_and_cuda_differ_natively_where_it_is_known(fresh: subprocess.CompletedProcess[str]) -> None:
    code, text = json.loads(fresh.stdout)[0]["policy diff cpu cuda --json --op-policy native"]
    found = json.loads(text)
    assert (code, found["equal"], found["what"], found["schema"]) == (1, False, "xamp policy diff", 1)
    assert (found["a"]["device"], found["b"]["device"]) == ("cpu", "cuda")
    differing = overloads(found["differences"])
    assert differing == sorted(differing)
    known = """softmax.int log_softmax.int layer_norm group_norm rms_norm exp log pow.Tensor_Scalar rsqrt sum
    sum.dim_IntList cumsum cumprod norm.Scalar linalg_vector_norm logsumexp softplus binary_cross_entropy grid_sampler
    einsum chain_matmul mv addmv gru.input gru_cell lstm_cell upsample_bilinear2d dot vdot tensordot index_put
    scatter_add addcmul convolution"""
    assert set(known.split()) <= set(differing)
    alike = "mm linear matmul conv2d bmm scaled_dot_product_attention prelu mse_loss prod rnn_tanh_cell"
    assert not set(alike.split()) & set(differing)
    assert overloads(found["expected"]) == list(GPU_KERNELS)
    assert found["same"] + len(differing) + len(GPU_KERNELS) == len(HERE)
    (layer_norm,) = [row for row in found["differences"] if row["overload"] == "layer_norm"]
    assert (layer_norm["a"]["native"], layer_norm["b"]["native"]) == ("none", "fp32")
    assert (layer_norm["a"]["results"]["lower"], layer_norm["b"]["results"]["lower"]) == ("float16", "float32")


def test_cpu_and_cuda_are_alike_under_portable_but_for_the_expected(
    shown: Callable[..., Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "diff", "cpu", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == compare(shown("cpu"), shown("cuda"))
    assert (found["equal"], found["differences"], found["unknown"]) == (True, [], [])
    assert found["same"] == len(HERE) - 5
    assert [(row["overload"], row["why"]) for row in found["expected"]] == [
        (name, "cpu: it has no kernel") for name in GPU_KERNELS
    ]
    on_cpu, on_cuda = (set(shown(device)["device_only"]) for device in ("cpu", "cuda"))
    assert found["device_only"] == {"a": sorted(on_cpu - on_cuda), "b": sorted(on_cuda - on_cpu)}
    text = words(render_diff(found))
    assert "differences: 0 expected, since one of the two cannot equalise it: 5 overload" in text
    assert "none: no kernel lower: fp16 fp16 fp16 - cpu: it has no kernel" in text
    assert "only in the list of cpu, not governed by the table: " in text
    said = f"no difference but the expected: {len(HERE) - 5} overloads alike, 0 different, 5 expected, 0 not to be told"
    assert said in text


def test_what_one_side_does_not_show_is_no_difference(shown: Callable[..., Saved]) -> None:
    if not (absent["xpu"] and absent["cuda"]):
        pytest.skip("there is a card, which shows it")
    found = compare(shown("xpu", "native"), shown("cuda", "native"))
    assert found["unknown"] == ["gru.data", "gru.input", "lstm.input"]
    assert (found["equal"], found["differences"]) == (True, [])
    assert "not to be told, since one of the two does not show it: 3\n  gru.data, gru.input, lstm.input" in render_diff(
        found
    )


def test_a_saved_device_is_that_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", "cpu", "--json", "--op-policy", "native", "--dtype", "bfloat16"]) == 0
    saved = tmp_path / "saved.json"
    saved.write_text(capsys.readouterr().out)
    # the other side is asked under the policy and the dtype of the file
    for sides in ([str(saved), "cpu"], ["cpu", str(saved)], [str(saved), str(saved)]):
        assert main(["policy", "diff", *sides]) == 0
        text = capsys.readouterr().out
        assert text.startswith("native policy, lower dtype bfloat16\n  A (cpu): torch ")
        alike = f"\ndifferences: 0\n\nno difference: {len(HERE)} overloads alike, 0 different, 0 expected,"
        assert f"{alike} 0 not to be told;" in text
        assert text.endswith("; entries of one list only: 0 and 0\n")
    assert main(["policy", "show", str(saved)]) == 0
    assert capsys.readouterr().out == render_show(json.loads(saved.read_text())) + "\n"


def test_a_file_of_another_torch_is_compared_by_what_it_says(
    tmp_path: Path, shown: Callable[..., Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    older = shown("cpu")
    count = len(older["rows"])
    older["torch"] = "2.6.0"
    row_of(older, "softmax.int")["results"]["lower"] = "float16"
    row_of(older, "cumsum")["results"]["lower"] = "unknown"
    row_of(older, "cudnn_convolution").update(cannot="", results={"fp32": "float16"})
    older["rows"] = [row for row in older["rows"] if row["overload"] != "rms_norm"]
    gone = older["device_only"].pop(0)
    older["device_only"].append("zeta")
    assert main(["policy", "diff", write(tmp_path / "older.json", older), "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert overloads(found["differences"]) == ["cudnn_convolution", "softmax.int"]
    assert (found["unknown"], found["expected"]) == (["cumsum"], [])
    assert found["rows"] == {"a": [], "b": ["rms_norm"]}
    assert found["device_only"] == {"a": ["zeta"], "b": [gone]}
    assert found["same"] == count - 4
    text = render_diff(found)
    assert f"  A (cpu): torch 2.6.0, xamp {xamp.__version__}; by calls on the device\n" in text
    assert "only in the table of B (cpu): 1\n  rms_norm\n" in text
    assert "only in the list of A (cpu), not governed by the table: 1\n  zeta\n" in text
    assert words(text).endswith(
        f"different: {count - 4} overloads alike, 2 different, 0 expected, 1 not to be told; "
        "entries of one list only: 1 and 1"
    )
    assert (
        "  softmax.int        fp32_dtype  none + fp32_dtype: fp32 fp16 - fp16  none + fp32_dtype: fp32 fp32 - fp16"
        in text
    )


@pytest.mark.parametrize("change", ["rows", "list"])
def test_one_device_with_another_list_is_a_difference(change: str, shown: Callable[..., Saved]) -> None:
    here, other = shown("cpu"), shown("cpu")
    del other["rows" if change == "rows" else "device_only"][0]
    assert compare(here, other)["equal"] is compare(other, here)["equal"] is False
    assert compare(here, {**other, "device": "another"})["equal"] is (change == "list")


# --- wrong use


def broken(change: Callable[[Saved], object], found: Saved) -> Saved:
    changed = copy.deepcopy(found)
    change(changed)
    return changed


DAMAGE: dict[str, tuple[Callable[[Saved], object], str]] = {
    "schema": (lambda found: found.update(schema=2), "of schema 2, and this xamp reads 1. Write it with this version"),
    "foreign": (lambda found: found.pop("what"), "JSON, but of something else"),
    "top": (lambda found: found.pop("device"), "damaged: 'device' is missing, or no str"),
    "kind": (lambda found: found.update(rows={}), "damaged: 'rows' is missing, or no list"),
    "field": (lambda found: found["rows"][3].pop("results"), "damaged: row 3 lacks 'results', or has something else"),
    "row": (lambda found: found["rows"].insert(2, "mm"), "damaged: row 2 lacks 'overload', or has something else"),
    "result": (lambda found: found["rows"][0]["results"].update(fp32=1), "damaged: row 0 lacks 'results', or has"),
    "twice": (lambda found: found["rows"].append(found["rows"][0]), "damaged: two rows for '_convolution'"),
    "names": (lambda found: found["device_only"].append(1), "damaged: 'device_only' has more than names"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(
    damage: str, tmp_path: Path, shown: Callable[..., Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    change, says = DAMAGE[damage]
    path = write(tmp_path / "file.json", broken(change, shown("cpu")))
    for arguments in (["show", path], ["diff", "cpu", path], ["diff", path, path]):
        assert main(["policy", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"xamp policy {arguments[0]}: {path}: {says}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON (Expecting value: line 1 column 1 (char 0)); a file is written by `xamp policy show DEV --json"),
        (b"{", "no JSON ("),
        (b"\xff\xfe\x00", "no JSON ("),
        (b"[" * 100_000, "no JSON ("),
        (b"[1]", "JSON, but of something else; a file is written by `xamp policy show DEV --json > FILE`"),
        (b'{"schema": 1, "ok": true, "backends": []}', "JSON, but of something else"),
    ],
)
def test_a_foreign_file_is_refused(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    assert main(["policy", "show", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"xamp policy show: {path}: {says}")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path, shown: Callable[..., Saved]) -> None:
    path = tmp_path / "marked.json"
    path.write_text(json.dumps(shown("cpu")), encoding="utf-8-sig")
    assert main(["policy", "diff", str(path), str(path)]) == 0


def test_a_device_that_nobody_serves_lists_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "show", "cdua"]) == 2
    assert capsys.readouterr().err == (
        f"xamp policy show: 'cdua' is neither a device nor a file. Did you mean 'cuda'? Devices are {SERVED}; "
        "any other argument is the path of a file that `xamp policy show DEV --json` wrote.\n"
    )
    assert main(["policy", "diff", "cpu", str(tmp_path)]) == 2
    assert f"xamp policy diff: {str(tmp_path)!r} is neither a device nor a file. Devices are" in capsys.readouterr().err
    with pytest.raises(xamp.errors.PolicyError, match=f"no backend serves 'cdua'; devices are {SERVED}"):
        policy.show("cdua")


def test_a_file_of_another_policy_is_not_compared(
    tmp_path: Path, shown: Callable[..., Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    native, portable = (write(tmp_path / f"{name}.json", shown("cpu", name)) for name in ("native", "portable"))
    for arguments, says in (
        ([native, portable], f"op policy: {native} has native, {portable} has portable. Compare what"),
        (["cpu", native, "--op-policy", "portable"], f"op policy: --op-policy has portable, {native} has native."),
        (["cpu", native, "--dtype", "bfloat16"], f"dtype: --dtype has bfloat16, {native} has float16."),
    ):
        assert main(["policy", "diff", *arguments]) == 2
        assert capsys.readouterr().err.startswith(f"xamp policy diff: {says}")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["shew"],
        ["show"],
        ["show", "cpu", "cuda"],
        ["diff", "cpu"],
        ["show", "cpu", "--op-policy", "fast"],
        ["show", "cpu", "--dtype", "float64"],
    ],
)
def test_wrong_use_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.startswith("usage: xamp")) == ("", True)


# --- devices of others, and what does not work


class Other(Backend):
    """A backend whose device this torch does not know."""


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "no_such_module:Backend",
            "backend 'zz' cannot be imported: ModuleNotFoundError: No module named 'no_such_mod",
        ),
        (
            "xamp.contract:Backend",
            f"torch {torch.__version__} cannot tell about 'zz': RuntimeError: Expected one of cpu, cuda",
        ),
    ],
)
def test_a_device_of_a_third_party(
    target: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = BackendSpec("zz", ("zz",), target, install_hint="pip install zz")
    monkeypatch.setattr(policy, "REGISTRY", Registry((*BUILT_INS, spec), group=None))
    assert main(["policy", "show", "zz"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"xamp policy show: {says}")
    cure = "pip install zz" if target.startswith("no_such") else "`xamp policy show zz --json > zz.json` where it can"
    assert cure in error


def test_a_device_that_can_be_emulated_is_asked_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = BackendSpec("zz", ("zz",), "xamp.contract:Backend", emulations=(("pretend", "a.b:run"),))
    monkeypatch.setattr(policy, "REGISTRY", Registry((*BUILT_INS, spec), group=None))
    assert main(["policy", "show", "zz"]) == 2
    assert "or ask an emulated one: xamp emulate pretend -- xamp policy show zz" in capsys.readouterr().err


def test_the_backend_of_highest_priority_that_can_be_imported_says_its_rules(
    monkeypatch: pytest.MonkeyPatch, shown: Callable[..., Saved]
) -> None:
    spec = BackendSpec("zz", ("cpu",), "no_such_module:Backend", priority=7)
    monkeypatch.setattr(policy, "REGISTRY", Registry((*BUILT_INS, spec), group=None))
    assert policy.show("cpu") == shown("cpu")


PRIVATE = """
import contextlib, io, json, sys, torch
from xamp.registry.registry import BUILT_INS, REGISTRY, Registry
from xamp.cli import main, policy
from xamp.contract import Backend, BackendSpec

class Own(Backend):
    op_rules = {"softmax.int": "same", "exp": "lower"}

class Module:
    is_initialized = is_available = _is_in_bad_fork = staticmethod(lambda: False)
    device_count = current_device = staticmethod(lambda: 0)

def lowered(name):
    op = getattr(torch.ops.aten, name).default
    def kernel(*tensors):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*(tensor.to(torch.get_autocast_dtype("own")) for tensor in tensors))
    return kernel

torch.utils.rename_privateuse1_backend("own")
torch._register_device_module("own", Module)
other, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
other.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for name in ("mm", "exp", "relu"):
    aten.impl(name, lowered(name), "AutocastPrivateUse1")
policy.REGISTRY = Registry((*BUILT_INS, BackendSpec("own", ("own",), "__main__:Own")), group=None)
answers = []
for command in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(command.split())
    answers.append([code, printed.getvalue()])
print(json.dumps(answers))
"""


def test_a_device_under_torchs_private_name_is_shown_by_its_own_list() -> None:
    commands = [
        "policy show own --json",
        "policy show own --json --op-policy native",
        "policy diff own cuda --json",
        "policy show own",
    ]
    done = subprocess.run(
        [python(), "-c", PRIVATE, *commands],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    (code, portable), (_, native), (differ, diff), (_, text) = json.loads(done.stdout)
    portable, native, diff = map(json.loads, (portable, native, diff))
    assert (code, portable["present"], portable["device_only"]) == (0, False, ["relu"])
    assert overloads(native["rows"], registered=True) == ["exp", "mm"]
    told = {name: row_of(native, name)["native"] for name in ("mm", "exp", "mv")}
    assert told == {"mm": "lower", "exp": "lower", "mv": "none"}
    assert overloads(portable["rows"], cannot="") == [name for name in HERE if name != "softmax.int"]
    assert overloads(portable["rows"], added=None) == ["mm", "softmax.int"]
    assert {row["agrees"] for row in portable["rows"] if not row["cannot"]} == {True}
    assert (differ, overloads(diff["expected"]), diff["differences"]) == (0, ["softmax.int"], [])
    assert text.startswith("own, portable policy, lower dtype float16\n")


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from xamp.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "policy", *arguments]
    return subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)


def test_files_are_compared_without_torch(tmp_path: Path, shown: Callable[..., Saved]) -> None:
    paths = [write(tmp_path / f"{name}.json", shown(name)) for name in ("cpu", "cuda")]
    done = without_torch("diff", *paths, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == compare(shown("cpu"), shown("cuda"))
    done = without_torch("show", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    said = f"xamp policy show: xamp policy needs torch >= {MINIMUM}, but torch cannot be imported"
    assert done.stderr.startswith(said)
    assert 'pip install "xamp[torch]"' in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, shown: Callable[..., Saved]) -> None:
    path = write(tmp_path / "cpu.json", shown("cpu"))
    command = [sys.executable, "-m", "xamp", "policy", "show", path, "--json"]
    with subprocess.Popen(
        command, env=plain_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
