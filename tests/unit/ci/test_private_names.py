"""What counts as a private name of torch, where one may stand, and that the table has each; where devices are named.

Covers: ci/private_names.py, ci/device_names.py, xamp.torch_compat.torch_private.names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ci_scripts import ROOT
from gathering import cases

from ci import device_names, private_names


def test_the_package_keeps_to_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert private_names.main([]) == 0, capsys.readouterr().out
    places = (*private_names.ADAPTERS, *private_names.OF_SCRIPTS, private_names.TABLE)
    assert [each for each in places if not (ROOT / each).exists()] == []
    assert private_names.MOST == 50
    monkeypatch.setattr(private_names, "MOST", 1)
    assert private_names.main([]) == 1
    assert "take one out" in capsys.readouterr().out


FOUND = {
    "import torch\ntorch._C.x()": ["torch._C.x"],
    "import torch._x": ["torch._x"],
    "import torch._C as c\nc.x": ["torch._C", "torch._C.x"],
    "from torch import _C\n_C.x": ["torch._C", "torch._C.x"],
    "from torch import nn\nnn.y._Z": ["torch.nn.y._Z"],
    "from torch.y import _z as w\nw()": ["torch.y._z"],
    "from torch._y import z": ["torch._y.z"],
    "import torch\na: object = torch.ops.aten\nb = a\nb._to": ["torch.ops.aten._to"],
    "import torch\na, b = torch.nn, torch.x\nb._c": ["torch.x._c"],
    "import torch\nclass A(torch._B):\n    x: torch._D": ["torch._B", "torch._D"],
    'import torch\nhasattr(torch.a, "_b")': ["torch.a._b"],
    'import torch as t\ngetattr(t._C, "x", t._d)': ["torch._C.x", "torch._d"],
    'import sys\nsys.modules["torch.a"]._b': ["torch.a._b"],
    'names = ["torch._dynamo.x", "torch.a:_B"]': ["torch._dynamo.x", "torch.a._B"],
    "import torch\ntorch._B.__name__": ["torch._B"],
    "import torch\ntorch.__version__": [],
    "import torch\ntorch.ops.npu._x\ntorch.npu._y": [],
    'import torch\nhasattr(torch.nn.Module, "_xamp_mark")': [],
    "import mine\nmine._x": [],
    "import torch\nt = torch.a\ndef f(t):\n    t._x": [],
    'text = "see torch._x"': [],
    "import torch\nx = torch.ones(1)\nx._version": [],
}


def test_a_name_is_found() -> None:
    with cases() as case:
        for source, wanted in FOUND.items():
            with case(source):
                assert [name for _, name in private_names.names(source)] == wanted


def test_what_is_misplaced_and_a_table_that_differs_is_told() -> None:
    (line,) = private_names.misplaced({"xamp/casting/wrong.py": "import torch\n\ntorch._w", "xamp/cli/x.py": "1"})
    assert line.startswith("xamp/casting/wrong.py:3: torch._w is private to torch")
    told = [*private_names.disagreements({"torch._a", "torch._new"}, {"torch._a", "torch._gone"})]
    assert [each.partition(" has")[0] for each in told] == ["torch._gone: no adapter", "torch._new: an adapter"]


def test_devices_are_named_in_exact_places(tmp_path: Path) -> None:
    assert list(device_names.found(ROOT / "xamp")) == []
    assert [each for each in device_names.EXEMPT if not (ROOT / "xamp" / each).exists()] == []
    named = ["scaling/backends.py", "scaling/backends/x.py", "cli/x.py", "port/x.py", "registry/registry/x.py"]
    for inside in [*named, "registry/registry.py", "backends/mine/chips.py"]:
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / inside).write_text('import torch\n\nKIND = "cuda:0"\nNAMES = {"npu": torch.npu}\n')
    found = [line.split(" in the core")[0] for line in device_names.found(tmp_path)]
    ends = ("3: 'cuda:0'", "4: 'npu'", "4: torch.npu")
    assert sorted(found) == sorted(f"xamp/{inside}:{end}" for inside in named for end in ends)
