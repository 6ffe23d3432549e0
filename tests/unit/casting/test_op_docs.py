"""docs/op-policy.md says what is so: its lists, its numbers and its commands.

Covers: xamp.casting.ops.table, xamp.cli.policy.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from xamp.casting.ops.table import LAYERS, RULES
from xamp.cli import main, policy

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "op-policy.md").read_text(encoding="utf-8")
WRITTEN_FROM = (2, 13)

of_this_torch = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) != WRITTEN_FROM,
    reason="what devices have differs between versions of torch",
)


def listed_after(words: str) -> list[str]:
    """The names in the indented block that follows the line with ``words``."""
    (after,) = re.findall(rf"{words}[^\n]*\n(?:[^\n]+\n)*\n((?:    [^\n]+\n)+)", TEXT)
    return str(after).split()


def number(pattern: str) -> int:
    (found,) = re.findall(pattern, TEXT)
    return int(found)


def added(device: str) -> list[Any]:
    return [row for row in policy.show(device)["rows"] if row["added"] is not None]


@pytest.mark.parametrize("kind", sorted({rule.kind for rule in RULES.values()}))
def test_the_rows_of_a_rule_are_those_of_the_table(kind: str) -> None:
    rows = [name for name, rule in RULES.items() if rule.kind == kind]
    assert listed_after(f"\n`{kind}`[,:]") == rows
    if kind != "banned":
        assert number(rf"\n`{kind}`, (\d+) overloads:") == len(rows)


def test_numbers() -> None:
    layers = [name for name in RULES if name.endswith((".data", ".input")) and name.split("_")[0] != "conv"]
    text = " ".join(TEXT.split())
    expected = f"{len(RULES)} overloads of torch's operators: the {len(RULES) - len(layers)} that CUDA's autocast"
    assert expected in text
    assert f"and {len(layers)} of [recurrent layers]" in text


@of_this_torch
def test_what_is_added() -> None:
    assert number(r"dispatch key: (\d+) on a CPU, none on CUDA\n?\s*but") == len(added("cpu"))
    assert {row["overload"] for row in added("cuda")} == LAYERS


@of_this_torch
def test_what_only_a_cpu_lists() -> None:
    only = policy.show("cpu")["device_only"]
    assert number(r"lacks in 16 bits\. (\d+) on a CPU") == len(only)
    assert "CUDA's list has one, `_cudnn_rnn`, in builds of torch with cuDNN." in " ".join(TEXT.split())
    assert policy.show("cuda")["device_only"] == (["_cudnn_rnn"] if torch.backends.cudnn.is_available() else [])


@of_this_torch
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_what_cannot_be_equalised(device: str) -> None:
    rows = re.findall(rf"^\| `{device}` \| ([^|]*) \|", TEXT, re.MULTILINE)
    cannot = [row["overload"] for row in policy.show(device)["rows"] if row["cannot"]]
    assert [name.strip("`") for row in rows for name in row.split()] == cannot


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    codes = []
    for line in re.findall(r"^    xamp (policy .*)$", TEXT, re.MULTILINE):
        command, _, file = line.partition(" > ")
        capsys.readouterr()
        codes.append(main(shlex.split(command)))
        if file:
            Path(file).write_text(capsys.readouterr().out, encoding="utf-8")
    assert codes == [0, 0, 0, 1, 0, 0]
