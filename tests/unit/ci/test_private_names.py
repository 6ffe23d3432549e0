"""What counts as a private name of torch, where one may stand, and that the table has each; where devices are named.

Covers: ci/private_names.py, ci/device_names.py, xamp.torch_compat.torch_private.names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ci_scripts import ROOT

from ci import device_names, private_names


def test_the_package_keeps_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert private_names.main([]) == 0, capsys.readouterr().out
    places = (*private_names.ADAPTERS, *private_names.OF_SCRIPTS, private_names.TABLE)
    assert [each for each in places if not (ROOT / each).exists()] == []
    assert private_names.MOST == 50


FOUND = {
    "import torch as t, torch._C as c\nc.x, t._d.__name__, t.__version__": ["torch._C", "torch._C.x", "torch._d"],
    "from torch import _C, nn\n_C.x, nn.y._Z": ["torch._C", "torch._C.x", "torch.nn.y._Z"],
    "from torch.y import _z as w\nfrom torch._y import z\nw()": ["torch.y._z", "torch._y.z"],
    "import torch\na: object = torch.ops.aten\nb, c = a, torch.x\nb._to, c._c": ["torch.ops.aten._to", "torch.x._c"],
    "import torch\nclass A(torch._B):\n    x: torch._D": ["torch._B", "torch._D"],
    'import torch\ngetattr(torch._C, "x", torch._d), hasattr(torch.a, "_b")': ["torch._C.x", "torch._d", "torch.a._b"],
    'import sys\nsys.modules["torch.a"]._b': ["torch.a._b"],
    'names = ["torch._dynamo.x", "torch.a:_B", "see torch._x"]': ["torch._dynamo.x", "torch.a._B"],
    'import torch, mine\nmine._x, torch.ops.npu._x, torch.npu._y, hasattr(torch.nn.Module, "_xamp_mark")': [],
    "import torch\nt = torch.a\nx = torch.ones(1)\nx._version\ndef f(t):\n    t._x": [],
}


def test_a_name_is_found() -> None:
    for source, wanted in FOUND.items():
        assert [name for _, name in private_names.names(source)] == wanted, source


TREE = {
    "xamp/torch_compat/torch_private/one.py": "import torch\nfrom torch._y import first\nthird = torch._z",
    "xamp/casting/wrong.py": "import torch\n\ntorch._w",
}


def test_a_name_elsewhere_and_a_table_that_differs_are_told() -> None:
    (line,) = private_names.misplaced(TREE)
    assert line.startswith("xamp/casting/wrong.py:3: torch._w is private to torch")
    assert private_names.taken(TREE) == {"torch._y.first", "torch._z"}
    told = private_names.disagreements({"torch._z", "torch._new"}, {"torch._z", "torch._gone"})
    assert [each.partition(":")[0] for each in told] == ["torch._gone", "torch._new"]


def test_devices_are_named_in_exact_places(tmp_path: Path) -> None:
    assert list(device_names.found(ROOT / "xamp")) == []
    assert [each for each in device_names.EXEMPT if not (ROOT / "xamp" / each).exists()] == []
    named = ["scaling/backends/x.py", "cli/x.py", "registry/registry/x.py"]
    for inside in [*named, "registry/registry.py", "backends/mine/chips.py"]:
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / inside).write_text('import torch\n\nKIND = "cuda:0"\nNAMES = {"npu": torch.npu}\n')
    found = [line.split(" in the core")[0] for line in device_names.found(tmp_path)]
    ends = ("3: 'cuda:0'", "4: 'npu'", "4: torch.npu")
    assert sorted(found) == sorted(f"xamp/{inside}:{end}" for inside in named for end in ends)
