"""Notebooks: only the text of edited cells changes, whatever wrote the file, and what a cell runs elsewhere is read.

Covers: xamp.port.notebook, xamp.port.cells, xamp.port.magics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.cli import main
from xamp.port import rules
from xamp.port.notebook import port_notebook
from xamp.port.rule import Grade
from xamp.port.source import Unreadable

Output = pytest.CaptureFixture[str]
LINES = ["import torch\n", "x = torch.ones(1).cuda()"]
OLD, NEW = "torch.ones(1).cuda()", "torch.ones(1).to(xamp.device())"


def book(source: Any, said: str = "ok", **layout: Any) -> str:
    """A notebook of one cell with an output."""
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "source": source}
    cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": [said]}]
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}, **layout)


def old_book(source: list[str]) -> str:
    """A notebook of version 3."""
    cell = {"cell_type": "code", "input": source, "language": "python", "outputs": []}
    return json.dumps({"nbformat": 3, "worksheets": [{"cells": [cell], "metadata": {}}]}, indent=1)


RAW = {
    "jupyter": book(LINES, indent=1, ensure_ascii=False) + "\n",
    "one line": book(LINES, separators=(",", ":")),
    "one line with spaces": book(LINES),
    "four spaces": book(LINES, indent=4),
    "tabs": book(LINES, indent="\t"),
    "an escape beside raw text": book(LINES, "B", indent=1, ensure_ascii=False).replace('"B"', '"\\u2588 é"'),
    "an empty list over two lines": book(LINES, "X", indent=2).replace('"X"', ""),
    "a number": book(LINES, indent=1).replace('"metadata": {}', '"metadata": {"lr": 1.0E-4, "n": NaN}', 1),
    "an escaped slash": book(LINES, "A", indent=1).replace('"A"', '"<\\/div>"'),
    "line endings of Windows": book(LINES, indent=1).replace("\n", "\r\n"),
    "half of a pair of surrogates": book(LINES, "B", indent=1).replace('"B"', '"é \\ud83d"'),
    "a mark of the byte order": "\ufeff" + book(LINES, indent=1),
    "version 3": old_book(LINES),
    "escapes in another line": book(["s = 'B'\n", *LINES], indent=1).replace("B", "\\u00e9 \\u002f é"),
    "escapes in the edited line": book([LINES[0], f"{LINES[1]}  # B"], indent=1).replace("B", "\\u00e9 \\u002f é"),
    "keys twice": book(LINES, indent=1).replace('"metadata": {}', '"metadata": {"a": 1, "a": 2}', 1),
}


def test_only_the_text_of_edited_cells_changes() -> None:
    rules.load()
    with cases() as case:
        for name, text in RAW.items():
            with case(name):
                after, ported = port_notebook(text.encode())
                wanted = text.replace(OLD, NEW)
                first = wanted.index('"import torch\\n"')
                joint = wanted[first + len('"import torch\\n"') :].partition('"')[0]
                wanted = wanted.replace('"import torch\\n"', f'"import torch\\n"{joint}"import xamp\\n"')
                assert after.decode() == wanted
                assert ported.changed
                assert port_notebook(after)[0] == after


def test_a_source_that_is_one_text_stays_one() -> None:
    text = book("import torch, xamp\ns = 'B'\nx = torch.ones(1).cuda()", indent=1).replace("B", "\\u00e9\\/")
    assert port_notebook(text.encode())[0].decode() == text.replace(OLD, NEW)


def test_a_source_cut_at_odd_places_is_written_by_lines() -> None:
    text = book(["import torch, xamp\nx = torch.ones(1)", ".cuda()\ny = ", "1"], indent=1)
    after = json.loads(port_notebook(text.encode())[0])["cells"][0]["source"]
    assert "".join(after) == "import torch, xamp\nx = torch.ones(1).to(xamp.device())\ny = 1"


def cells(*codes: str) -> bytes:
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": code} for code in codes]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def codes(data: bytes) -> list[str]:
    return [cell["source"] for cell in json.loads(data)["cells"]]


MAGICS = {
    "below comments": ("# first\n\n%%time\nx = y.cuda()", "# first\n\n%%time\nx = y.to(xamp.device())"),
    "below a title": ("#@title Run\n%%bash\nnvidia-smi", None),
    "of another language": ("# js\n%%javascript\nlet cuda = 1;", None),
    "a shell": ("%%bash\nCUDA_VISIBLE_DEVICES=0 python a.py", "%%bash\nCUDA_VISIBLE_DEVICES=0 Y=0 python a.py"),
    "a shell below a comment": (
        "# run\n%%sh\nexport CUDA_VISIBLE_DEVICES=0\n",
        "# run\n%%sh\nexport CUDA_VISIBLE_DEVICES=0 Y=0\n",
    ),
    "one line for a shell": ("!CUDA_VISIBLE_DEVICES=0 python a.py", "!CUDA_VISIBLE_DEVICES=0 Y=0 python a.py"),
    "in a block": (
        "if x:\n    !CUDA_VISIBLE_DEVICES=1 python a.py\n",
        "if x:\n    !CUDA_VISIBLE_DEVICES=1 Y=1 python a.py\n",
    ),
    "a file": (
        "%%writefile a.py\nimport torch\nx = x.cuda()\n",
        "%%writefile a.py\nimport torch\nimport xamp\nx = x.to(xamp.device())\n",
    ),
    "another file": ("%%writefile a.txt\nx = x.cuda()\n", None),
    "%env": ("%env CUDA_VISIBLE_DEVICES=0", None),
}


def test_what_a_cell_runs_elsewhere_is_read_as_what_it_is() -> None:
    with cases() as case:
        for name, (before, after) in MAGICS.items():
            with case(name):
                wanted = before if after is None else after.replace("Y=", "ASCEND_RT_VISIBLE_DEVICES=")
                assert codes(port_notebook(cells("import torch, xamp", before))[0])[1] == wanted


def test_what_a_cell_runs_elsewhere_is_told() -> None:
    _, ported = port_notebook(
        cells("import xamp", "!nvidia-smi", "%env CUDA_VISIBLE_DEVICES=0", "!pip install spconv", "%%bash\nnvcc -V")
    )
    assert {(each.line, each.grade, each.text.partition(";")[0]) for each in ported.findings} >= {
        (2, Grade.NOTED, "code cell 2: nvidia-smi: npu-smi info shows NPUs"),
        (3, Grade.NOTED, "code cell 3: CUDA_VISIBLE_DEVICES hides CUDA's devices only"),
        (5, Grade.NOTED, "code cell 5: nvcc: CUDA's compiler, which an NPU machine does not have"),
    }
    assert [each.line for each in ported.findings if each.grade is Grade.UNSUPPORTED] == [4]


SAID = (
    ("%pip install spconv-cu118", Grade.UNSUPPORTED),
    ("!pip install \\\n  xformers", Grade.UNSUPPORTED),
    ("%conda install cudatoolkit", Grade.UNSUPPORTED),
    ("%run train.py --device cuda", Grade.NOTED),
    ("%time y = x.cuda()", Grade.NOTED),
    ("for i in range(2):\n    %timeit x.cuda()", Grade.NOTED),
    ("%%writefile c.yaml\ndevice: cuda", Grade.NOTED),
    ("%%writefile run.sh\nCUDA_VISIBLE_DEVICES=0 python a.py", Grade.CERTAIN),
    ("%%writefile Dockerfile\nFROM nvidia/cuda:11.0", Grade.NOTED),
    ("%%cu\n__global__ void k() {}", Grade.UNSUPPORTED),
    ("%%writefile k.cu\n__global__ void k() {}", Grade.UNSUPPORTED),
)


def test_each_line_for_ipython_that_names_cuda_is_told_of_once() -> None:
    with cases() as case:
        for source, grade in SAID:
            with case(source):
                ported = port_notebook(book(source).encode())[1]
                assert [each.grade for each in ported.findings] == [grade]
                assert not ported.stays
        for source in ("x.cuda?", "%%javascript\nvar cuda = 1"):
            with case(source):
                ported = port_notebook(book(source).encode())[1]
                assert not ported.findings
                assert len(ported.stays) == 1


MAGIC_FIRST = (
    ["%%capture out\n", "y = x.cuda()"],
    ["# a comment\n", "\n", "%%time\n", "y = x.cuda()"],
    ["%%time\n", "import torch\n", "y = x.cuda()"],
    ["#@title A\n", "%%timeit -n 1\n", "# another\n", "y = x.cuda()"],
)


def test_a_magic_stays_the_first_line_of_its_cell() -> None:
    with cases() as case:
        for source in MAGIC_FIRST:
            with case(source):
                after = json.loads(port_notebook(book(source).encode())[0])["cells"][0]["source"]
                code = [line for line in after if line.strip() and not line.startswith("#")]
                assert code[0].startswith("%%")
                assert "import xamp\n" in code


def test_a_notebook_of_another_language_is_left_alone() -> None:
    data = json.loads(cells("x = y.cuda()"))
    data["metadata"] = {"kernelspec": {"language": "julia"}}
    text = json.dumps(data).encode()
    assert port_notebook(text)[0] == text


@pytest.mark.parametrize("text", ["{}", "[]", '{"cells": 1}', '{"cells": [{"cell_type": "code", "source": 1}]}', "{"])
def test_what_is_no_notebook_is_told(text: str) -> None:
    with pytest.raises(Unreadable, match="no notebook that can be read"):
        port_notebook(text.encode())


def test_no_file_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    lone = book(LINES, indent=1).replace("ones(1)", "ones(1, '\\ud83d')")
    (tmp_path / "a.ipynb").write_text(lone)
    (tmp_path / "b.ipynb").write_bytes(cells("import xamp\nx = y.cuda()", "z = '\ud83d'"))
    (tmp_path / "c.py").write_text("import xamp\nx = y.cuda()\n")
    assert main(["port", ".", "--write", "--report", "out.json"]) == 1
    error = capsys.readouterr().err
    assert "half of a pair of surrogates" in error
    assert "code cell 2 stays as it is" in error
    assert (tmp_path / "a.ipynb").read_text() == lone
    assert codes((tmp_path / "b.ipynb").read_bytes())[0] == "import xamp\nx = y.to(xamp.device())"
    assert (tmp_path / "c.py").read_text() == "import xamp\nx = y.to(xamp.device())\n"
